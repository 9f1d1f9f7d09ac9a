/** Goodput: which part of the time was useful training, a bar for each attempt. */

import type { GoodputPart, GoodputView } from "../api/text-documents";
import type { OpenRun } from "../run/open-run";
import { useSummary } from "../run/summary";
import { Card } from "../ui/card";
import { countOf } from "../words/ranks";
import "./goodput.css";

/** Renders nothing if it is not known, as in summaries of earlier versions. */
export function GoodputPanel({ run }: { run: OpenRun }) {
  const found = useSummary(run)?.text.goodput ?? null;
  if (found === null || found.attempts.length === 0) return null;
  return (
    <Card title="Goodput" class="goodput" about={found.line} part="goodput" csv={{ name: `${run.name}-goodput`, make: () => figures(found) }}>
      {found.left > 0 && <p class="muted small">{countOf(found.left, "earlier attempt")} not drawn</p>}
      <ul class="goodput-attempts" aria-label="Attempts">
        {found.attempts.map((attempt) => (
          <li key={attempt.name}>
            <span class="goodput-name">{attempt.name}</span>
            <span class="goodput-bar" role="img" aria-label={attempt.parts.map(words).join(", ") || attempt.text || attempt.name}>
              {attempt.parts.map((part) => (
                <span key={part.part} class={`goodput-part ${part.part}`} title={words(part)} style={{ width: `${(part.seconds / (found.longest_s || 1)) * 100}%` }} />
              ))}
            </span>
            <span class="goodput-text">{attempt.text}</span>
          </li>
        ))}
      </ul>
      <ul class="legend goodput-legend" aria-label="Parts of the whole run">
        {found.parts.map((part) => (
          <li key={part.part}>
            <span class={`swatch goodput-part ${part.part}`} aria-hidden="true" />
            {part.name} <span class="goodput-figure">{part.text}</span>
          </li>
        ))}
      </ul>
      {found.notes.map((note) => (
        <p key={note} class="muted small goodput-note">
          {note}
        </p>
      ))}
    </Card>
  );
}

function words(part: GoodputPart): string {
  return `${part.name} ${part.text}`;
}

function figures({ attempts, parts }: GoodputView): { columns: string[]; rows: (string | number | null)[][] } {
  const keys = parts.map(({ part }) => part);
  const seconds = (of: readonly GoodputPart[], key: string): number => of.find(({ part }) => part === key)?.seconds ?? 0;
  return {
    columns: ["attempt", "seconds", ...keys.map((key) => `${key}_seconds`)],
    rows: attempts.map((attempt) => [attempt.name, attempt.seconds, ...keys.map((key) => seconds(attempt.parts, key))]),
  };
}
