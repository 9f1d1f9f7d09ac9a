/** What was recorded around an incident: samples, logs, errors, stacks, other runs, and the timeline. */

import type { ComponentChildren } from "preact";
import { siblingRun } from "../address";
import type { IncidentDocument, LogPiece, SourceText } from "../api/incident-documents";
import { LineChartView } from "../charts/line-chart";
import { incidentLink, runLink } from "../route";
import { Card } from "../ui/card";
import { count, dateTime } from "../ui/format";
import { SeverityMark } from "../ui/severity";
import { From, List, Table, When } from "./incident-statements";
import "./incidents.css";

export function Around({ found: { samples } }: { found: IncidentDocument }) {
  if (samples === undefined) return null;
  return (
    <Card title="Around the onset">
      <div class="incident-charts">
        {samples.charts.map((chart) => (
          <figure key={chart.title}>
            <LineChartView chart={chart} />
            <From source={chart.source} />
          </figure>
        ))}
      </div>
      <List rows={samples.statements} />
      {samples.changes.length > 0 && (
        <Table name="Samples that changed" columns={["source", "figure", "before", "after", "spreads", "from"]}>
          {samples.changes.map((row) => (
            <tr key={`${row.who} ${row.label}`}>
              <th scope="row">{row.who}</th>
              <td>{row.label}</td>
              <td>{row.before_text}</td>
              <td>{row.after_text}</td>
              <td>{row.score}</td>
              <td>
                <From source={row.source} />
              </td>
            </tr>
          ))}
        </Table>
      )}
    </Card>
  );
}

export function Logs({ found: { logs } }: { found: IncidentDocument }) {
  if (logs === undefined) return null;
  return (
    <Card title="Logs around the onset">
      <List rows={logs.statements} />
      {logs.pieces.map((piece) => (
        <Piece key={piece.file} piece={piece} />
      ))}
    </Card>
  );
}

function Piece({ piece }: { piece: LogPiece }) {
  const lines = (some: readonly string[], from: number): ComponentChildren =>
    some.map((line, at) => (
      <div class="log-line" key={from + at}>
        {piece.first_line !== null && <span class="log-number">{piece.first_line + from + at}</span>}
        {line}
      </div>
    ));
  return (
    <div class="incident-log">
      <p class="muted small">
        {piece.text} <From source={piece.source} />
      </p>
      <div class="log" tabIndex={0} role="region" aria-label={`Lines of ${piece.file}`}>
        {lines(piece.lines.slice(0, piece.before), 0)}
        <div class="log-here">onset</div>
        {lines(piece.lines.slice(piece.before), piece.before)}
      </div>
    </div>
  );
}

export function Errors({ found: { errors } }: { found: IncidentDocument }) {
  if (errors === undefined) return null;
  return (
    <Card title="Errors" about={errors.left_out > 0 ? `and ${count(errors.left_out)} of other processes` : undefined}>
      {errors.errors.map((row) => (
        <details key={row.source.text} class="stack" open={errors.errors.length === 1}>
          <summary>
            {row.rank === null ? "launcher" : `rank ${row.rank}`}: {row.text} <From source={row.source} />
          </summary>
          <pre class="incident-frames">{row.traceback.join("\n")}</pre>
        </details>
      ))}
    </Card>
  );
}

export function Stacks({ found: { stacks } }: { found: IncidentDocument }) {
  if (stacks === undefined) return null;
  return (
    <Card title="Stacks">
      {stacks.hangs.map((hang, at) => (
        <div key={at}>
          <List rows={hang.statements} />
          {hang.groups.map((group) => (
            <Frames key={group.who} title={group.who} frames={group.frames} source={group.source} />
          ))}
        </div>
      ))}
      {stacks.places.map((place) => (
        <Frames key={place.text + place.frames.join()} title={place.text} frames={place.frames} source={place.source} />
      ))}
    </Card>
  );
}

function Frames({ title, frames, source }: { title: string; frames: readonly string[]; source: SourceText }) {
  return (
    <details class="stack">
      <summary>
        {title} <code>{frames[0]}</code> <From source={source} />
      </summary>
      <pre class="incident-frames">{frames.join("\n")}</pre>
    </details>
  );
}

export function Changes({ found: { changes, run }, name }: { found: IncidentDocument; name: string }) {
  if (changes === undefined) return null;
  const { git, rows = [] } = changes;
  return (
    <Card title="Since the last good run" about={changes.run === undefined ? undefined : <a href={runLink(siblingRun(name, run.name, changes.run))}>{changes.run}</a>}>
      <List rows={changes.statements} />
      {git != null && (
        <>
          <List rows={git.statements.slice(0, 1)} />
          <ul class="incident-commits">
            {git.commits.map((commit) => (
              <li key={commit.text}>
                <code>{commit.text.slice(0, 10)}</code>
                {commit.text.slice(10)}{" "}
                <span class="muted">
                  {commit.author}, {dateTime(commit.wall_ns ?? 0)}
                </span>
              </li>
            ))}
            {(git.commits_left_out ?? 0) > 0 && <li class="muted">and {count(git.commits_left_out)} more</li>}
          </ul>
          <List rows={git.statements.slice(1)} />
          <ul class="incident-commits">
            {git.files.map((file) => (
              <li key={file.text}>
                <code>{file.text}</code>
              </li>
            ))}
            {(git.files_left_out ?? 0) > 0 && <li class="muted">and {count(git.files_left_out)} more</li>}
          </ul>
        </>
      )}
      {rows.length > 0 && (
        <Table name="Changed settings" columns={["kind", "setting", "then", "now", "from"]}>
          {rows.map((row) => (
            <tr key={`${row.kind} ${row.label}`}>
              <td>{row.kind}</td>
              <th scope="row">{row.label}</th>
              <td>
                <code>{row.before}</code>
              </td>
              <td>
                <code>{row.after}</code>
              </td>
              <td>
                <From source={row.source} />
              </td>
            </tr>
          ))}
        </Table>
      )}
    </Card>
  );
}

export function Earlier({ found: { earlier, run }, name }: { found: IncidentDocument; name: string }) {
  if (earlier === undefined) return null;
  return (
    <Card title="Earlier incidents">
      <List rows={earlier.statements} />
      {earlier.incidents.length > 0 && (
        <ul class="incident-list">
          {earlier.incidents.map((row) => (
            <li key={`${row.run} ${row.number}`}>
              <SeverityMark look={row.severity} />
              <div>
                <a href={incidentLink(siblingRun(name, run.name, row.run), row.number)}>{row.title}</a>
                <p class="facts">
                  <span>{row.run}</span>
                  <span>{dateTime(row.wall_ns)}</span>
                  <span>same {row.same.join(", ")}</span>
                  <From source={row.source} />
                </p>
              </div>
            </li>
          ))}
        </ul>
      )}
    </Card>
  );
}

export function Timeline({ found: { timeline } }: { found: IncidentDocument }) {
  if (timeline === undefined || timeline.length === 0) return null;
  return (
    <Card title="Timeline">
      <ol class="incident-timeline">
        {timeline.map((row, at) => (
          <li key={at} class={`${row.severity} ${row.what === "onset" ? "onset" : ""}`}>
            <When row={row} />
            <span class="muted">{row.step === null || row.step === undefined ? "" : `step ${count(row.step)}`}</span>
            <span class="incident-what">{row.what}</span>
            <span>
              {row.severity !== "info" && <SeverityMark look={row.severity} />} {row.text} <From source={row.source} />
            </span>
          </li>
        ))}
      </ol>
    </Card>
  );
}
