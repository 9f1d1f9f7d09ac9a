/** In the place of a report.html whose data cannot be used: what is wrong with it, and what to do. */

import type { Failure } from "../api/source";

export function DamagedCopy({ failure }: { failure: Failure }) {
  return (
    <main class="trouble">
      <h1>This copy of a run cannot be opened</h1>
      <p role="alert">{failure.message}</p>
      <p>
        Whoever has the run makes another with <code>stepscope report RUN --html FILE</code>; packed (zip), it comes through any mail as it is.
      </p>
    </main>
  );
}
