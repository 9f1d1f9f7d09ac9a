/** What differs between the runs besides their times: job, code, environment and settings. */

import type { CompareDocument } from "../api/compare-documents";
import { letterOf, ownWords } from "../run/compare";
import { Card, Nothing } from "../ui/card";
import { Letter } from "./compare-letter";

type Value = string | number | boolean | null;

export function CompareSettings({ found }: { found: CompareDocument }) {
  const { runs, settings } = found;
  return (
    <Card
      title="Differences in setup"
      about="job, machine, versions, code, settings and environment"
      csv={{ name: "compare-settings", make: () => ({ columns: ["kind", "setting", ...runs.map((run) => run.label)], rows: settings.map(({ kind, label, values }) => [kind, label, ...values.map(text)]) }) }}
    >
      {settings.length === 0 ? (
        <Nothing>No known differences.</Nothing>
      ) : (
        <div class="scrolls">
          <table class="settings">
            <thead>
              <tr>
                <th scope="col">Setting</th>
                {runs.map((run, at) => (
                  <th key={run.id} scope="col">
                    <Letter at={at} /> <span class="hidden">{letterOf(at)}</span> <bdi>{run.label}</bdi>
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {settings.map(({ kind, label, values }) => (
                <tr key={`${kind} ${label}`}>
                  <th scope="row">{label}</th>
                  {values.map((value, at) => (
                    <td key={at} data-side={letterOf(at)}>
                      <Shown value={value} baseline={at === 0 ? (values[1] ?? null) : (values[0] ?? null)} />
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Card>
  );
}

function text(value: Value): string | null {
  return value === null ? null : typeof value === "boolean" ? (value ? "yes" : "no") : String(value);
}

/** In a long text, words that the baseline lacks are marked. */
function Shown({ value, baseline }: { value: Value; baseline: Value }) {
  const shown = text(value);
  if (shown === null) return <span class="muted">not set</span>;
  const words = ownWords(shown, text(baseline));
  if (words.length < 4) return <code>{shown}</code>;
  return <code>{words.map(({ text: word, own }, at) => (own ? <mark key={at}>{word}</mark> : word))}</code>;
}
