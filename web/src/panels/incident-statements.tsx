/** Statements of an incident, each with its source, and the tables and lists made of them. */

import type { ComponentChildren } from "preact";
import type { SourceText, Statement } from "../api/incident-documents";
import { Card } from "../ui/card";
import { clock, dateTime } from "../ui/format";

/** The source of a statement, small and always visible. */
export function From({ source }: { source: SourceText }) {
  return <span class="source">{source.text}</span>;
}

export function When({ row }: { row: { wall_ns?: number | null } }) {
  if (row.wall_ns === null || row.wall_ns === undefined) return null;
  return (
    <time dateTime={new Date(row.wall_ns / 1e6).toISOString()} title={dateTime(row.wall_ns)}>
      {clock(row.wall_ns)}
    </time>
  );
}

export function List({ rows }: { rows: readonly Statement[] }) {
  return (
    <ul class="statements">
      {rows.map((row) => (
        <li key={row.text}>
          {row.text} <When row={row} /> <From source={row.source} />
        </li>
      ))}
    </ul>
  );
}

export function Statements({ title, rows, half = false }: { title: string; rows: readonly Statement[] | undefined; half?: boolean }) {
  if (rows === undefined || rows.length === 0) return null;
  return (
    <Card title={title} class={half ? "half" : ""}>
      <List rows={rows} />
    </Card>
  );
}

export function Table({ name, columns, children }: { name: string; columns: readonly string[]; children: ComponentChildren }) {
  return (
    <div class="scrolls" tabIndex={0} role="region" aria-label={name}>
      <table>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column} scope="col">
                {column}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}
