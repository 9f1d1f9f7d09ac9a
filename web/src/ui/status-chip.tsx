/** Status of a run or of its connection: a shape and a word, not only a color. */

import { statusLook, statusText, type Ending, type Tone } from "../words/standing";
import "./status-chip.css";

export function StatusChip({ of }: { of: Ending }) {
  const [tone, shape] = statusLook(of);
  return <Chip tone={tone} shape={shape} words={statusText(of)} />;
}

export function Chip({ tone, shape, words }: { tone: Tone; shape: string; words: string }) {
  return (
    <span class={`chip ${tone}`}>
      <span class="chip-shape" aria-hidden="true">
        {shape}
      </span>
      {words}
    </span>
  );
}
