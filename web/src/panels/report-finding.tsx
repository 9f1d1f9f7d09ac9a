/** A verdict or finding of a report on files: what is wrong, what it costs, the advice and the evidence; then the others. */

import { useState } from "preact/hooks";
import type { ReportFinding, Verdict } from "../api/report-document";
import { SeverityMark, severityWord } from "../ui/severity";
import { Circle } from "./circle";
import { Evidence } from "./evidence";
import { PriceView } from "./price";
import "./verdict.css";
import "./report-finding.css";

/** `label`: accessible name of the card. */
export function ReportFindingCard({ label, finding: { verdict: finding, others, more } }: { label: string; finding: Verdict }) {
  return (
    <section class={`card verdict ${finding.look}`} aria-label={label}>
      <div class="verdict-head">
        <SeverityMark look={finding.look} large />
        <div>
          <h2>{finding.title}</h2>
          <Facts finding={finding} />
        </div>
      </div>
      <ReportFindingBody finding={finding} />
      {others.length > 0 && (
        <div class="others">
          <h3>Also found</h3>
          {others.map((one) => (
            <Other key={one.title} finding={one} />
          ))}
          {more !== "" && <p class="muted">{more}</p>}
        </div>
      )}
    </section>
  );
}

function Other({ finding }: { finding: ReportFinding }) {
  const [open, setOpen] = useState(false);
  return (
    <details class={`other ${finding.look}`} open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <SeverityMark look={finding.look} />
        <span class="other-title">
          {finding.title}
          {finding.price !== null && <span class="report-finding-price">{finding.price}</span>}
        </span>
      </summary>
      <Facts finding={finding} />
      <ReportFindingBody finding={finding} />
    </details>
  );
}

function Facts({ finding }: { finding: ReportFinding }) {
  return (
    <p class="facts">
      <span class={`severity ${finding.look}`}>{severityWord(finding.look)}</span>
      {finding.kind !== "" && <span>{finding.kind}</span>}
      {finding.facts.map((fact) => (
        <span key={fact}>{fact}</span>
      ))}
    </p>
  );
}

function ReportFindingBody({ finding }: { finding: ReportFinding }) {
  const known = finding.evidence.length > 0;
  if (finding.price === null && finding.advice.length + finding.sides.length === 0 && finding.certainty === null && !known) return null;
  return (
    <div class="finding-body">
      {finding.price !== null && <PriceView words={finding.price.split("; ")} left={finding.left} />}
      {finding.sides.length > 0 && <Sides sides={finding.sides} />}
      {finding.advice.length > 0 && (
        <div class="finding-columns without-pictures">
          <div>
            <h3>What to do</h3>
            <ol class="advice">
              {finding.advice.map((line) => (
                <li key={line}>{line}</li>
              ))}
            </ol>
          </div>
        </div>
      )}
      {finding.certainty !== null && <p class="muted">{finding.certainty}</p>}
      {known && (
        <details class="fold">
          <summary>Evidence</summary>
          <Evidence rows={finding.evidence} />
        </details>
      )}
    </div>
  );
}

function Sides({ sides }: { sides: ReportFinding["sides"] }) {
  return (
    <div class="report-finding-sides">
      {sides.map((side) => (
        <div key={side.title}>
          <h3>{side.title}</h3>
          {side.ring.length > 0 ? <Circle ring={side.ring} cycle={side.items.map(([text]) => text)} /> : <SideList side={side} />}
        </div>
      ))}
    </div>
  );
}

function SideList({ side }: { side: ReportFinding["sides"][number] }) {
  return (
    <ul class="report-finding-list">
      {side.items.map(([text, code], at) => (
        <li key={at}>
          {text}
          {code !== "" && <code class="report-finding-line">{code}</code>}
        </li>
      ))}
      {side.more !== "" && <li class="muted">{side.more}</li>}
    </ul>
  );
}
