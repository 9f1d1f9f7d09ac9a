/** Severity as a shape, a color and a word. */

import type { Look } from "../api/text-documents";

const MARKS: Record<Look, [string, string]> = {
  critical: ["✖", "critical"],
  warning: ["▲", "warning"],
  info: ["●", "info"],
  healthy: ["✔", "healthy"],
};

/** Documents come from run folders, which may come from anyone. */
function markOf(look: Look): [string, string] {
  return Object.hasOwn(MARKS, look) ? MARKS[look] : MARKS.info;
}

export function severityWord(look: Look): string {
  return markOf(look)[1];
}

export function SeverityMark({ look, large = false }: { look: Look; large?: boolean }) {
  const [sign, word] = markOf(look);
  return (
    <span class={`severity ${look} ${large ? "large" : ""}`} title={word}>
      <span aria-hidden="true">{sign}</span>
      <span class="hidden">{word}: </span>
    </span>
  );
}
