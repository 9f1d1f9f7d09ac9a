/** The letter of a compared run, in the color of its line. */

import { lineLook } from "../charts/curves";
import { letterOf } from "../run/compare";

export function Letter({ at }: { at: number }) {
  return (
    <span class="letter" style={{ background: `var(${lineLook(at).property})` }} aria-hidden="true">
      {letterOf(at)}
    </span>
  );
}
