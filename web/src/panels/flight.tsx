/** Flight Recorder results: each rank's progress in the last collectives, the divergence, and which ranks wait for which. */

import { useEffect, useRef } from "preact/hooks";
import type { FlightView as Flight } from "../api/text-documents";
import { countOf } from "../words/ranks";
import "./flight.css";
import { Frames } from "./stacks";

/** Up to so many groups are shown at once in a report. */
const FEW_GROUPS = 16;

/** A sign and a look for each mark, in addition to its meaning. */
const MARKS: Readonly<Record<string, readonly [sign: string, look: string]>> = {
  c: ["", "ended"],
  s: ["▸", "started"],
  w: ["…", "waiting"],
  x: ["≠", "other"],
  d: ["≠", "other"],
  m: ["·", "missing"],
  "-": ["", "unknown"],
  "?": ["?", "unknown"],
};

export function FlightView({ flight }: { flight: Flight }) {
  return (
    <div class="flight">
      <h3>Flight Recorders</h3>
      <p class="muted small">{flight.about}</p>
      <FlightRecords flight={flight} />
      {flight.problems.length > 0 && <p class="muted small">{flight.problems.join(" ")}</p>}
    </div>
  );
}

/** The divergence, the grid of ranks and collectives, the waits, the groups. `report`: they are the subject of the page. */
export function FlightRecords({ flight, report = false }: { flight: Flight; report?: boolean }) {
  const { divergence, grid, waits, waits_left: waitsLeft, groups } = flight;
  return (
    <>
      {divergence !== null && (
        <div>
          <p>{divergence.text}</p>
          <ul class="flight-sides">
            {divergence.sides.map((side) => (
              <SideLine key={side.who} side={side} />
            ))}
          </ul>
        </div>
      )}
      {grid !== null && <Grid grid={grid} />}
      {waits.length > 0 && (
        <ul class="plain-list">
          {waits.map((wait, at) => (
            <li key={at}>{wait}</li>
          ))}
          {waitsLeft > 0 && <li class="muted">and {waitsLeft} more</li>}
        </ul>
      )}
      {(groups.length > 1 || (report && groups.length > 0)) && <Groups flight={flight} open={report && groups.length <= FEW_GROUPS} />}
    </>
  );
}

function SideLine({ side }: { side: NonNullable<Flight["divergence"]>["sides"][number] }) {
  return (
    <li class={side.odd ? "odd" : ""}>
      {side.odd && <span aria-hidden="true">≠ </span>}
      {side.who}: <code>{side.call}</code>
      {side.where !== null && (
        <span class="muted">
          {" "}
          at <code title={side.where.file}>{side.where.text}</code>
        </span>
      )}
      {side.pieces.length > 0 && (
        <details class="fold">
          <summary>Stack of this call</summary>
          <Frames pieces={side.pieces} />
        </details>
      )}
    </li>
  );
}

function Grid({ grid }: { grid: NonNullable<Flight["grid"]> }) {
  const meanings = new Map(grid.legend);
  // The last numbers matter most; scroll to them in a narrow window.
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (box.current !== null) box.current.scrollLeft = box.current.scrollWidth;
  }, [grid.sequences.at(-1)]);
  return (
    <figure class="flight-figure">
      <figcaption class="muted small">{grid.about}</figcaption>
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
            {grid.rows.map(({ who, odd, marks }) => (
              <tr key={who} class={odd ? "odd" : ""}>
                <th scope="row">
                  {odd && <span aria-hidden="true">≠ </span>}
                  {who}
                </th>
                {[...marks].map((mark, at) => (
                  <td key={at}>
                    <Cell mark={mark} meaning={meanings.get(mark) ?? "unknown"} />
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {grid.left > 0 && <p class="muted small">and {grid.left} more rows</p>}
      <ul class="legend">
        {grid.legend.map(([mark, meaning]) => (
          <li key={mark}>
            <Cell mark={mark} meaning={meaning} quiet /> {meaning}
          </li>
        ))}
      </ul>
    </figure>
  );
}

function Cell({ mark, meaning, quiet = false }: { mark: string; meaning: string; quiet?: boolean }) {
  const [sign, look] = MARKS[mark] ?? ["?", "unknown"];
  return (
    <span class={`flight-mark ${look}`} title={meaning}>
      <span aria-hidden="true">{sign}</span>
      {!quiet && <span class="hidden">{meaning}</span>}
    </span>
  );
}

function Groups({ flight: { groups, groups_left: left }, open }: { flight: Flight; open: boolean }) {
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
            {groups.map((row, at) => (
              <tr key={at} class={row.behind ? "culprit" : ""}>
                <th scope="row">
                  {row.behind && <span class="severity critical">✖ </span>}
                  {row.name}
                </th>
                <td>{row.members}</td>
                <td>{row.called}</td>
                <td>{row.started}</td>
                <td>{row.ended}</td>
              </tr>
            ))}
          </tbody>
        </table>
        {left > 0 && <p class="muted">and {countOf(left, "more group")}</p>}
      </div>
    </details>
  );
}
