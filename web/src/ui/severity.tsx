/** Severity as a shape, a color and a word. */

import type { Look } from "../api/text-documents";

const MARKS: Record<Look, [string, string]> = {
  critical: ["✖", "critical"],
  warning: ["▲", "warning"],
  info: ["●", "info"],
  healthy: ["✔", "healthy"],
};

export function severityWord(look: Look): string {
  return MARKS[look][1];
}

export function SeverityMark({ look, large = false }: { look: Look; large?: boolean }) {
  const [sign, word] = MARKS[look];
  return (
    <span class={`severity ${look} ${large ? "large" : ""}`} title={word}>
      <span aria-hidden="true">{sign}</span>
      <span class="hidden">{word}: </span>
    </span>
  );
}
