/** The figures of the compared runs, one column for each: the value, and its change against the first run. */

import type { CompareCell, CompareDocument, CompareRow } from "../api/compare-documents";
import type { MetricsDocument } from "../api/documents";
import { numberText } from "../panels/metrics";
import { letterOf } from "../run/compare";
import { Card, Nothing } from "../ui/card";
import { Letter } from "./compare-letter";

const SHAPES = { better: "▼", worse: "▲", alike: "≈" };
const WORDS = { better: "better", worse: "worse", alike: "within what chance can do" };

/** `answers`: of `useMetrics`. */
export function CompareTable({ found, answers }: { found: CompareDocument; answers: readonly (MetricsDocument | null)[] }) {
  const rows = [...found.rows, ...metricRows(answers)];
  const sections = [...new Set(rows.map((row) => row.section))];
  const clock = found.clock === "device" ? "device time (the list of runs shows host time)" : "host time";
  return (
    <Card
      title="Figures"
      about={`${clock}, steady steps${found.runs.some((run) => (run.ranks ?? 0) > 1) ? ", mean over ranks" : ""}; the list shows p50; changes against A, gray if within what chance can do`}
      csv={{ name: "compare-figures", make: () => table(found, rows) }}
    >
      {rows.every((row) => row.cells.every((cell) => cell === null)) ? (
        <Nothing>There are no figures that these runs share.</Nothing>
      ) : (
        <div class="scrolls">
          <table class="figures">
            <thead>
              <tr>
                <td />
                {found.runs.map((run, at) => (
                  <th key={run.id} scope="col" class="number">
                    <Letter at={at} /> <span class="hidden">{letterOf(at)}</span> <bdi class="figures-name">{run.label}</bdi>
                  </th>
                ))}
              </tr>
            </thead>
            {sections.map((section) => (
              <tbody key={section}>
                <tr>
                  <th scope="rowgroup" colSpan={found.runs.length + 1} class="figures-section">
                    {section}
                  </th>
                </tr>
                {rows
                  .filter((row) => row.section === section)
                  .map((row) => (
                    <tr key={row.name}>
                      <th scope="row">{row.name}</th>
                      {row.cells.map((cell, at) => (
                        <td key={at} class="number">
                          <Cell cell={cell} />
                        </td>
                      ))}
                    </tr>
                  ))}
              </tbody>
            ))}
          </table>
        </div>
      )}
    </Card>
  );
}

function Cell({ cell }: { cell: CompareCell | null }) {
  if (cell === null) return <span class="muted">–</span>;
  return (
    <>
      <span class="figures-value">{cell.text}</span>
      {cell.change !== null && (
        <span class={`figures-change ${cell.look ?? ""}`} title={cell.look === null ? "" : WORDS[cell.look]}>
          {cell.look !== null && (
            <>
              <span aria-hidden="true">{SHAPES[cell.look]} </span>
              <span class="hidden">{WORDS[cell.look]}: </span>
            </>
          )}
          {cell.change}
        </span>
      )}
    </>
  );
}

/** The last value of each number that a script noted: only the user knows which is better. */
export function metricRows(answers: readonly (MetricsDocument | null)[]): CompareRow[] {
  const lasts = answers.map((answer) => new Map(answer?.metrics.map(({ name, value }) => [name, value.at(-1) ?? null]) ?? []));
  const names = [...new Set(lasts.flatMap((values) => [...values.keys()]))];
  return names.map((name) => ({
    section: "Noted by the scripts, last value",
    name,
    cells: lasts.map((values) => {
      const value = values.get(name) ?? null;
      return value === null ? null : { value, text: numberText(value), change: null, look: null };
    }),
  }));
}

function table(found: CompareDocument, rows: readonly CompareRow[]) {
  const columns = ["section", "figure", ...found.runs.flatMap((run) => [run.label, `${run.label} change`])];
  return { columns, rows: rows.map((row) => [row.section, row.name, ...row.cells.flatMap((cell) => [cell?.value ?? null, cell?.change ?? null])]) };
}
