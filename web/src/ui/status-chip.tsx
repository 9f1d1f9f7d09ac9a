/** Status of a run or of its connection: a shape and a word, not only a color. */

import type { Severity, Status } from "../api/documents";
import "./status-chip.css";

export type Tone = "" | "good" | "warning" | "critical" | "live";
/** What the hub says about how a run ended. */
type Ending = Pick<Status, "status_text" | "status_severity">;

const LOOKS: Readonly<Record<Severity, readonly [Tone, string]>> = { info: ["good", "✓"], warning: ["warning", "■"], critical: ["critical", "✖"] };

export function statusLook(of: Ending): readonly [Tone, string] {
  return of.status_text === "running" ? ["live", "●"] : LOOKS[of.status_severity];
}

export function StatusChip({ of }: { of: Ending }) {
  const [tone, shape] = statusLook(of);
  return <Chip tone={tone} shape={shape} words={of.status_text} />;
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
