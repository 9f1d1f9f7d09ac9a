/** Above what is shown while the hub does not answer and the screen asks again. */

export function OutOfDate() {
  return (
    <p class="banner warning" role="status">
      These figures are out of date because the hub is not responding correctly. Retrying automatically.
    </p>
  );
}
