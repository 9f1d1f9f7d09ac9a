/** The cost of a finding in one line, and the time that would remain without it. */

import { percent } from "../ui/format";
import "./price.css";

/** `words`: short phrases; `left`: the share of the time that would remain, null if unknown. */
export function PriceView({ words, left }: { words: readonly string[]; left: number | null }) {
  return (
    <div class="price">
      <p>
        {words.map((word, at) => (
          <span key={word} class={at === 0 ? "price-first" : ""}>
            {word}
          </span>
        ))}
      </p>
      {left !== null && (
        <div class="price-steps" role="img" aria-label={`The same steps would take ${percent(left)} of the time`}>
          <span>now</span>
          <span class="price-bar now" />
          <span>100%</span>
          <span>without it</span>
          <span class="price-left">
            <span class="price-bar then" style={{ width: `${Math.max(2, left * 100)}%` }} />
          </span>
          <span>{percent(left)}</span>
        </div>
      )}
    </div>
  );
}
