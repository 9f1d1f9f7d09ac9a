/** Status of a run or of its connection: a shape and a word, not only a color. */

import "./status-chip.css";

export type Tone = "" | "good" | "warning" | "critical" | "live";

const STATUSES: Record<string, [Tone, string]> = {
  running: ["live", "●"],
  finished: ["good", "✓"],
  failed: ["critical", "✖"],
  crashed: ["critical", "✖"],
  interrupted: ["warning", "■"],
  unfinished: ["warning", "?"],
};

export function StatusChip({ status }: { status: string }) {
  const [tone, shape] = STATUSES[status] ?? ["", "○"];
  return <Chip tone={tone} shape={shape} words={status} />;
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
