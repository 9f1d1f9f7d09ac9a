/** The findings of each run against those of the first: new, no longer there, and still there with their price. */

import type { CompareDocument, ComparedFinding } from "../api/compare-documents";
import { letterOf } from "../run/compare";
import { Card } from "../ui/card";
import { SeverityMark } from "../ui/severity";
import { Letter } from "./compare-letter";

export function CompareFindings({ found }: { found: CompareDocument }) {
  const rows = found.runs.flatMap((run, at) => {
    const findings = run.comparison?.findings ?? null;
    return findings === null ? [] : [{ run, at, findings }];
  });
  if (rows.length === 0) return null;
  return (
    <Card title="Findings" about="against A, with the share of the time that they cost">
      {rows.map(({ run, at, findings }) => (
        <section key={run.id} class="compare-findings" aria-label={`Findings of ${letterOf(at)}`}>
          <h3>
            <Letter at={at} /> <bdi>{run.label}</bdi>
          </h3>
          <Group title="New" rows={findings.new} none="Nothing new." />
          <Group title="No longer found" rows={findings.gone} gone />
          <Group title="Still found" rows={findings.kept} />
        </section>
      ))}
    </Card>
  );
}

function Group({ title, rows, none, gone = false }: { title: string; rows: readonly ComparedFinding[]; none?: string; gone?: boolean }) {
  if (rows.length === 0) return none === undefined ? null : <p class="muted">{none}</p>;
  return (
    <>
      <h4>{title}</h4>
      <ul>
        {rows.map((row) => (
          <li key={`${row.kind} ${row.title}`}>
            <SeverityMark look={gone ? "healthy" : row.severity} /> {row.title} {row.price && <span class="muted">{gone ? `It cost ${row.price}.` : row.price}</span>}
          </li>
        ))}
      </ul>
    </>
  );
}
