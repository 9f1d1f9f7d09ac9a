/** Evidence, facts and settings: names and values, nested like the data, in the hub's words. */

import type { Row, Shown } from "../api/text-documents";
import { dateTime } from "../ui/format";
import "./evidence.css";

export function Evidence({ rows }: { rows: readonly Row[] }) {
  return rows.length === 0 ? null : <Pairs rows={rows} left={0} />;
}

export function Pairs({ rows, left }: { rows: readonly Row[]; left: number }) {
  return (
    <dl class="pairs">
      {rows.map((row) => (
        <div key={row.key} class={row.value.form === "text" || row.value.form === "time" ? "" : "nested"}>
          <dt>{row.name}</dt>
          <dd>
            <Value value={row.value} name={row.name} />
          </dd>
        </div>
      ))}
      <More left={left} />
    </dl>
  );
}

function Value({ value, name }: { value: Shown; name: string }) {
  switch (value.form) {
    case "text":
      return <>{value.text}</>;
    case "time":
      return <>{dateTime(value.wall_ns)}</>;
    case "pairs":
      return <Pairs rows={value.rows} left={value.left} />;
    case "list":
      return (
        <ul class="plain-list">
          {value.items.map((item, at) => (
            <li key={at}>
              <Value value={item} name={`${name} ${at + 1}`} />
            </li>
          ))}
          {value.left > 0 && <li class="muted">and {value.left} more</li>}
        </ul>
      );
    case "table":
      return (
        <div class="scrolls" tabIndex={0} role="region" aria-label={`Table: ${name}`}>
          <table>
            <thead>
              <tr>
                {value.columns.map((column) => (
                  <th key={column} scope="col">
                    {column}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {value.rows.map((row, at) => (
                <tr key={at}>
                  {row.map((cell, column) => (
                    <td key={column}>{cell}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
          <More left={value.left} />
        </div>
      );
  }
}

function More({ left }: { left: number }) {
  return left > 0 ? <div class="muted">and {left} more</div> : null;
}
