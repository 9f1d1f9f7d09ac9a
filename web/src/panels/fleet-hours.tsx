/** GPU hours by cause: over time, and by job, team, user or host. Each bar leads to its runs. */

import { useState } from "preact/hooks";
import type { Behind, CauseRow, FleetDocument, ShareRow } from "../api/fleet-documents";
import { barParts, behindLink, behindText, periodText, sumOf, USEFUL, type BarPart } from "../run/fleet-bars";
import { Card, Nothing } from "../ui/card";
import { hoursText, percent } from "../ui/format";
import "./fleet.css";

const SHOWN = 12;

export function HoursOverTime({ causes, over }: { causes: readonly CauseRow[]; over: FleetDocument["over_time"] }) {
  const [useful, setUseful] = useState(false);
  const bars = over.rows.map((row) => ({ row, parts: barParts(causes, row.by_cause, useful) }));
  const most = Math.max(...bars.map(({ parts }) => sumOf(parts)), 0);
  return (
    <Card
      title={useful ? "GPU hours over time" : "Lost GPU hours over time"}
      about={`by ${over.unit}`}
      tools={
        <button type="button" class="quiet" aria-pressed={useful} onClick={() => setUseful(!useful)}>
          With useful training
        </button>
      }
      csv={{ name: "fleet-hours", make: () => ({ columns: ["begin", "gpu_hours", ...causes.map(({ cause }) => cause)], rows: over.rows.map((row) => [new Date(row.begin_wall_ns / 1e6).toISOString(), row.gpu_hours, ...causes.map(({ cause }) => row.by_cause[cause] ?? 0)]) }) }}
    >
      {bars.length === 0 ? (
        <Nothing>No finished runs in this period.</Nothing>
      ) : (
        <div class="fleet-over">
          <span class="fleet-top" aria-hidden="true">
            {hoursText(most)} h
          </span>
          <ol class="fleet-columns" aria-label={`${useful ? "" : "Lost "}GPU hours by ${over.unit}`}>
            {bars.map(({ row, parts }) => {
              const when = periodText(row.begin_wall_ns, over.unit);
              return (
                <li key={row.begin_wall_ns}>
                  <BarLink row={row} about={when} words={`${when}: ${partsText(parts)}`} class="fleet-column">
                    {parts.map((part) => (
                      <span key={part.cause} class={`fleet-part cause-${part.cause}`} style={{ height: `${(part.hours / (most || 1)) * 100}%` }} />
                    ))}
                  </BarLink>
                </li>
              );
            })}
          </ol>
          <p class="fleet-ends" aria-hidden="true">
            <span>{periodText(bars[0]?.row.begin_wall_ns ?? 0, over.unit)}</span>
            {bars.length > 1 && <span>{periodText(bars.at(-1)?.row.begin_wall_ns ?? 0, over.unit)}</span>}
          </p>
        </div>
      )}
      <ul class="legend fleet-legend" aria-label="Causes">
        {causes
          .filter(({ cause, gpu_hours }) => gpu_hours > 0 && (useful || cause !== USEFUL))
          .map((row) => {
            const href = behindLink(row, row.name);
            const text = (
              <>
                <span class={`swatch fleet-part cause-${row.cause}`} aria-hidden="true" />
                {row.name}{" "}
                <span class="muted">
                  {hoursText(row.gpu_hours)} h{row.share === null ? "" : `, ${percent(row.share)}`}
                </span>
              </>
            );
            return (
              <li key={row.cause}>
                {href === null ? text : (
                  <a href={href} title={`The ${behindText(row)} that lost most to it`}>
                    {text}
                  </a>
                )}
              </li>
            );
          })}
      </ul>
    </Card>
  );
}

export function HoursBy({ causes, tables }: { causes: readonly CauseRow[]; tables: readonly [string, readonly ShareRow[]][] }) {
  const [chosen, setChosen] = useState(tables[0]?.[0] ?? "");
  const [useful, setUseful] = useState(false);
  const [all, setAll] = useState(false);
  const rows = tables.find(([name]) => name === chosen)?.[1] ?? [];
  const bars = (all ? rows : rows.slice(0, SHOWN)).map((row) => ({ row, parts: barParts(causes, row.by_cause, useful) }));
  const most = Math.max(...bars.map(({ parts }) => sumOf(parts)), 0);
  return (
    <Card
      title={`${useful ? "GPU hours" : "Lost GPU hours"} by ${chosen}`}
      tools={
        <>
          {tables.map(([name]) => (
            <button key={name} type="button" class="quiet" aria-pressed={name === chosen} onClick={() => setChosen(name)}>
              {name}
            </button>
          ))}
          <button type="button" class="quiet" aria-pressed={useful} onClick={() => setUseful(!useful)}>
            With useful training
          </button>
        </>
      }
      csv={{ name: `fleet-by-${chosen}`, make: () => ({ columns: [chosen, "runs", "gpu_hours", ...causes.map(({ cause }) => cause)], rows: rows.map((row) => [row.name, row.run_count, row.gpu_hours, ...causes.map(({ cause }) => row.by_cause[cause] ?? 0)]) }) }}
    >
      {rows.length === 0 && <Nothing>Nothing to show by {chosen}.</Nothing>}
      <ul class="fleet-rows" aria-label={`By ${chosen}`}>
        {bars.map(({ row, parts }) => (
          <li key={row.key}>
            <span class="fleet-name" title={row.name}>
              <bdi>{row.name}</bdi>
            </span>
            <BarLink row={row} about={row.name} words={`${row.name}: ${partsText(parts)}`} class="fleet-bar">
              {parts.map((part) => (
                <span key={part.cause} class={`fleet-part cause-${part.cause}`} style={{ width: `${(part.hours / (most || 1)) * 100}%` }} />
              ))}
            </BarLink>
            <span class="fleet-text">
              {hoursText(sumOf(parts))} h{row.useful_share !== null && <span class="muted">, {percent(row.useful_share)} useful</span>}
            </span>
          </li>
        ))}
      </ul>
      {rows.length > SHOWN && (
        <button type="button" class="quiet" aria-expanded={all} onClick={() => setAll(!all)}>
          {all ? "Show fewer" : `Show all ${rows.length}`}
        </button>
      )}
    </Card>
  );
}

interface BarLinkProps {
  row: Behind;
  about: string;
  words: string;
  class: string;
  children: preact.ComponentChildren;
}

/** A bar that leads to its runs; a picture with words if none of them is in the list. */
function BarLink({ row, about, words, class: kind, children }: BarLinkProps) {
  const href = behindLink(row, about);
  const text = `${words} (${behindText(row)})`;
  if (href === null) {
    return (
      <span class={kind} role="img" aria-label={text} title={text}>
        {children}
      </span>
    );
  }
  return (
    <a class={kind} href={href} aria-label={text} title={text}>
      {children}
    </a>
  );
}

function partsText(parts: readonly BarPart[]): string {
  return [...parts].sort((one, two) => two.hours - one.hours).map(({ name, hours }) => `${name} ${hoursText(hours)} h`).join(", ") || "nothing lost";
}
