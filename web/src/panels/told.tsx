/** A verdict or finding of a report on files: what is wrong, what it costs, the advice and the evidence; then the others. */

import { useState } from "preact/hooks";
import type { Told, Verdict } from "../api/report-document";
import { SeverityMark, severityWord } from "../ui/severity";
import { Circle } from "./circle";
import { Evidence } from "./evidence";
import { PriceView } from "./price";
import "./verdict.css";
import "./told.css";

/** `label`: accessible name of the card. */
export function ToldCard({ label, told: { verdict: told, others, more } }: { label: string; told: Verdict }) {
  return (
    <section class={`card verdict ${told.look}`} aria-label={label}>
      <div class="verdict-head">
        <SeverityMark look={told.look} large />
        <div>
          <h2>{told.title}</h2>
          <Facts told={told} />
        </div>
      </div>
      <ToldBody told={told} />
      {others.length > 0 && (
        <div class="others">
          <h3>Also found</h3>
          {others.map((one) => (
            <Other key={one.title} told={one} />
          ))}
          {more !== "" && <p class="muted">{more}</p>}
        </div>
      )}
    </section>
  );
}

function Other({ told }: { told: Told }) {
  const [open, setOpen] = useState(false);
  return (
    <details class={`other ${told.look}`} open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <SeverityMark look={told.look} />
        <span class="other-title">
          {told.title}
          {told.price !== null && <span class="told-price">{told.price}</span>}
        </span>
      </summary>
      <Facts told={told} />
      <ToldBody told={told} />
    </details>
  );
}

function Facts({ told }: { told: Told }) {
  return (
    <p class="facts">
      <span class={`severity ${told.look}`}>{severityWord(told.look)}</span>
      {told.kind !== "" && <span>{told.kind}</span>}
      {told.facts.map((fact) => (
        <span key={fact}>{fact}</span>
      ))}
    </p>
  );
}

function ToldBody({ told }: { told: Told }) {
  const known = told.evidence.length > 0;
  if (told.price === null && told.advice.length + told.sides.length === 0 && told.certainty === null && !known) return null;
  return (
    <div class="finding-body">
      {told.price !== null && <PriceView words={told.price.split("; ")} left={told.left} />}
      {told.sides.length > 0 && <Sides sides={told.sides} />}
      {told.advice.length > 0 && (
        <div class="finding-columns without-pictures">
          <div>
            <h3>What to do</h3>
            <ol class="advice">
              {told.advice.map((line) => (
                <li key={line}>{line}</li>
              ))}
            </ol>
          </div>
        </div>
      )}
      {told.certainty !== null && <p class="muted">{told.certainty}</p>}
      {known && (
        <details class="fold">
          <summary>Evidence</summary>
          <Evidence rows={told.evidence} />
        </details>
      )}
    </div>
  );
}

function Sides({ sides }: { sides: Told["sides"] }) {
  return (
    <div class="told-sides">
      {sides.map((side) => (
        <div key={side.title}>
          <h3>{side.title}</h3>
          {side.ring.length > 0 ? <Circle ring={side.ring} cycle={side.items.map(([text]) => text)} /> : <SideList side={side} />}
        </div>
      ))}
    </div>
  );
}

function SideList({ side }: { side: Told["sides"][number] }) {
  return (
    <ul class="told-list">
      {side.items.map(([text, code], at) => (
        <li key={at}>
          {text}
          {code !== "" && <code class="told-line">{code}</code>}
        </li>
      ))}
      {side.more !== "" && <li class="muted">{side.more}</li>}
    </ul>
  );
}
