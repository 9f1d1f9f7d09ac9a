/** Flight Recorder results: each rank's progress in the last collectives, the divergence, and which ranks wait for which. */

import { useEffect, useRef } from "preact/hooks";
import type { FlightDocument, Side } from "../api/hang-documents";
import { MARKS, groupsInTrouble, meaningOf, partedText, sideText, waitText, type Mark } from "../words/flight";
import { groupName } from "../words/hang";
import { ranksText } from "../words/ranks";
import { placeText } from "../words/stacks";
import "./flight.css";

const ROWS = 64;
const GROUPS = 40;

/** Renders nothing if no recorder responded. */
export function FlightView({ flight, culprits, now }: { flight: Partial<FlightDocument>; culprits: readonly number[]; now: boolean }) {
  const { grid, first_divergence: parted, wait_for: waits = [], groups = [], problems = [], ranks = [], world = 0 } = flight;
  if (!grid && !parted && groups.length === 0) return null;
  return (
    <div class="flight">
      <h3>Flight Recorders</h3>
      <p class="muted small">
        From {ranks.length === world ? `all ${world}` : `${ranks.length} of ${world}`} ranks. {flight.undecidable === true ? "These records alone do not show which rank is responsible." : flight.title}
      </p>
      {parted && (
        <div>
          <p>{partedText(parted)}</p>
          <ul class="flight-sides">
            {parted.call_sites.map((side) => (
              <SideLine key={side.ranks.join()} side={side} odd={parted.ranks.some((rank) => side.ranks.includes(rank))} />
            ))}
          </ul>
        </div>
      )}
      {grid && grid.sequences.length > 0 && <Grid grid={grid} now={now} odd={new Set(culprits.length > 0 ? culprits : flight.culprits)} />}
      {waits.length > 0 && (
        <ul class="plain-list">
          {waits.slice(0, 16).map((wait) => (
            <li key={`${wait.group} ${wait.sequence} ${wait.waited.join()}`}>{waitText(wait, now)}</li>
          ))}
          {waits.length > 16 && <li class="muted">and {waits.length - 16} more</li>}
        </ul>
      )}
      {groups.length > 1 && <Groups groups={groups} />}
      {problems.length > 0 && <p class="muted small">{problems.slice(0, 4).join(" ")}</p>}
    </div>
  );
}

function SideLine({ side, odd }: { side: Side; odd: boolean }) {
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
    </li>
  );
}

function Grid({ grid, odd, now }: { grid: NonNullable<FlightDocument["grid"]>; odd: ReadonlySet<number>; now: boolean }) {
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
            {grid.rows.slice(0, ROWS).map(([ranks, marks]) => (
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
      {grid.rows.length > ROWS && <p class="muted small">and {grid.rows.length - ROWS} more rows</p>}
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

function Groups({ groups }: { groups: FlightDocument["groups"] }) {
  const rows = groupsInTrouble(groups);
  return (
    <details class="fold">
      <summary>Progress of {groups.length} groups</summary>
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
            {rows.slice(0, GROUPS).map((row) => (
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
        {rows.length > GROUPS && <p class="muted">and {rows.length - GROUPS} more groups</p>}
      </div>
    </details>
  );
}
