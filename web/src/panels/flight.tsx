/** Flight Recorder results: each rank's progress in the last collectives, the divergence, and which ranks wait for which. */

import { useEffect, useRef } from "preact/hooks";
import type { FlightDocument, Side } from "../api/hang-documents";
import { MARKS, groupsInTrouble, meaningOf, partedText, sideText, waitText, type Mark } from "../words/flight";
import { groupName } from "../words/hang";
import { countOf, ranksText } from "../words/ranks";
import { placeText } from "../words/stacks";
import "./flight.css";
import { Frames } from "./stacks";

const ROWS = 64;
const GROUPS = 40;
/** As many are shown at once in a report. */
const FEW_GROUPS = 16;

/** Renders nothing if no recorder responded. */
export function FlightView({ flight, culprits, now }: { flight: Partial<FlightDocument>; culprits: readonly number[]; now: boolean }) {
  const { grid, first_divergence: parted, groups = [], problems = [], ranks = [], world = 0 } = flight;
  if (!grid && !parted && groups.length === 0) return null;
  return (
    <div class="flight">
      <h3>Flight Recorders</h3>
      <p class="muted small">
        From {ranks.length === world ? `all ${world}` : `${ranks.length} of ${world}`} ranks.
      </p>
      <FlightRecords flight={flight} culprits={culprits} now={now} />
      {problems.length > 0 && <p class="muted small">{problems.slice(0, 4).join(" ")}</p>}
    </div>
  );
}

interface RecordsProps {
  flight: Partial<Pick<FlightDocument, "culprits" | "first_divergence" | "wait_for" | "groups" | "grid">>;
  culprits: readonly number[];
  now: boolean;
  /** Show everything that the document has, and how much it leaves out. */
  all?: { groups_left: number; waits_left: number; rows_left: number };
}

/** The divergence, the grid of ranks and collectives, the waits, the groups. */
export function FlightRecords({ flight, culprits, now, all }: RecordsProps) {
  const { grid, first_divergence: parted, wait_for: waits = [], groups = [] } = flight;
  const most = all === undefined ? 16 : Infinity;
  return (
    <>
      {parted && (
        <div>
          <p>{partedText(parted)}</p>
          <ul class="flight-sides">
            {parted.call_sites.map((side) => (
              <SideLine key={side.ranks.join()} side={side} odd={parted.ranks.some((rank) => side.ranks.includes(rank))} stack={all !== undefined} />
            ))}
          </ul>
        </div>
      )}
      {grid && grid.sequences.length > 0 && (
        <Grid grid={grid} now={now} odd={new Set(culprits.length > 0 ? culprits : flight.culprits)} most={all === undefined ? ROWS : Infinity} left={all?.rows_left ?? 0} />
      )}
      {waits.length > 0 && (
        <ul class="plain-list">
          {waits.slice(0, most).map((wait) => (
            <li key={`${wait.group} ${wait.sequence} ${wait.waited.join()}`}>{waitText(wait, now)}</li>
          ))}
          {(waits.length > most || (all?.waits_left ?? 0) > 0) && <li class="muted">and {Math.max(0, waits.length - most) + (all?.waits_left ?? 0)} more</li>}
        </ul>
      )}
      {(groups.length > 1 || (all !== undefined && groups.length > 0)) && <Groups groups={groups} most={all === undefined ? GROUPS : Infinity} left={all?.groups_left ?? 0} open={all !== undefined && groups.length <= FEW_GROUPS} />}
    </>
  );
}

function SideLine({ side, odd, stack }: { side: Side; odd: boolean; stack: boolean }) {
  return (
    <li class={odd ? "odd" : ""}>
      {odd && <span aria-hidden="true">≠ </span>}
      {ranksText(side.ranks, true)}: <code>{sideText(side)}</code>
      {side.at !== null && (
        <span class="muted">
          {" "}
          at <code title={side.at.file}>{placeText(side.at)}</code>
        </span>
      )}
      {stack && side.frames.length > 0 && (
        <details class="fold">
          <summary>Stack of this call</summary>
          <Frames thread={side} />
        </details>
      )}
    </li>
  );
}

function Grid({ grid, odd, now, most, left }: { grid: NonNullable<FlightDocument["grid"]>; odd: ReadonlySet<number>; now: boolean; most: number; left: number }) {
  const used = Object.entries(MARKS).filter(([mark]) => grid.rows.some(([, marks]) => marks.includes(mark)));
  // The last numbers matter most; scroll to them in a narrow window.
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (box.current !== null) box.current.scrollLeft = box.current.scrollWidth;
  }, [grid.sequences.at(-1)]);
  return (
    <figure class="flight-figure">
      <figcaption class="muted small">
        The last collectives of {groupName(grid)}, by number; one row for ranks with equal progress.
      </figcaption>
      <div class="scrolls" ref={box} tabIndex={0} role="region" aria-label="Ranks and collectives">
        <table class="flight-grid">
          <thead>
            <tr>
              <th scope="col">Ranks</th>
              {grid.sequences.map((number) => (
                <th key={number} scope="col" class="sequence">
                  {number}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {grid.rows.slice(0, most).map(([ranks, marks]) => (
              <tr key={ranks.join()} class={ranks.some((rank) => odd.has(rank)) ? "odd" : ""}>
                <th scope="row">
                  {ranks.some((rank) => odd.has(rank)) && <span aria-hidden="true">≠ </span>}
                  {ranksText(ranks)}
                </th>
                {[...marks].map((mark, at) => (
                  <td key={at}>
                    <Cell meaning={meaningOf(markOf(mark), now)} mark={markOf(mark)} />
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {Math.max(0, grid.rows.length - most) + left > 0 && <p class="muted small">and {Math.max(0, grid.rows.length - most) + left} more rows</p>}
      <ul class="legend">
        {used.map(([letter, mark]) => (
          <li key={letter}>
            <Cell meaning={meaningOf(mark, now)} mark={mark} quiet /> {meaningOf(mark, now)}
          </li>
        ))}
      </ul>
    </figure>
  );
}

function Cell({ mark, meaning, quiet = false }: { mark: Mark; meaning: string; quiet?: boolean }) {
  return (
    <span class={`flight-mark ${mark.look}`} title={meaning}>
      <span aria-hidden="true">{mark.sign}</span>
      {!quiet && <span class="hidden">{meaning}</span>}
    </span>
  );
}

function markOf(letter: string): Mark {
  return MARKS[letter] ?? { sign: "?", look: "unknown", meaning: "unknown" };
}

function Groups({ groups, most, left, open }: { groups: FlightDocument["groups"]; most: number; left: number; open: boolean }) {
  const rows = groupsInTrouble(groups);
  const more = Math.max(0, rows.length - most) + left;
  return (
    <details class="fold" open={open}>
      <summary>Progress of {countOf(groups.length + left, "group")}</summary>
      <div class="scrolls" tabIndex={0} role="region" aria-label="Groups">
        <table>
          <thead>
            <tr>
              <th scope="col">Group</th>
              <th scope="col">Members</th>
              <th scope="col">Called</th>
              <th scope="col">Started</th>
              <th scope="col">Ended</th>
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, most).map((row) => (
              <tr key={row.key} class={row.trouble ? "culprit" : ""}>
                <th scope="row">
                  {row.trouble && <span class="severity critical">✖ </span>}
                  {row.name}
                </th>
                <td>{ranksText(row.members)}</td>
                <td>{row.called}</td>
                <td>{row.started}</td>
                <td>{row.ended}</td>
              </tr>
            ))}
          </tbody>
        </table>
        {more > 0 && <p class="muted">and {countOf(more, "more group")}</p>}
      </div>
    </details>
  );
}
