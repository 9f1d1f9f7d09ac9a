/** Tables of a report: sorted by a click on a heading, further columns on request, as CSV. */

import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Cell, TableDocument } from "../api/report-document";
import { Card } from "../ui/card";
import { csvText, download } from "../ui/csv";
import { count } from "../ui/format";
import "./report-table.css";

/** Further rows are shown on request. */
const ROWS_SHOWN = 25;

interface TablesProps {
  title: string;
  about: string;
  tables: readonly TableDocument[];
  /** Start of the name of CSV files. */
  file: string;
}

/** One table fills the card; several are folded. */
export function TablesCard({ title, about, tables, file }: TablesProps) {
  const [only] = tables;
  if (tables.length === 1 && only !== undefined) {
    return (
      <Card title={title} about={about} tools={<CsvButton table={only} file={file} />}>
        <TableView table={only} titled={only.title !== title} />
      </Card>
    );
  }
  return (
    <Card title={title} about={about}>
      {tables.map((table) => (
        <TableFold key={table.title} table={table} file={file} />
      ))}
    </Card>
  );
}

function TableFold({ table, file }: { table: TableDocument; file: string }) {
  // Collapsed tables are not rendered: a report may have dozens of a hundred rows each.
  const [open, setOpen] = useState(table.open);
  return (
    <details class="report-fold" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        {table.title} <span class="muted">{count(table.rows.length)}</span>
      </summary>
      {open && <TableView table={table} titled={false} tools={<CsvButton table={table} file={file} />} />}
    </details>
  );
}

function CsvButton({ table, file }: { table: TableDocument; file: string }) {
  return (
    <button type="button" class="quiet" aria-label={`Download “${table.title}” as CSV`} title="Download this table" onClick={() => download(`${file}-${table.title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.csv`, csvText({ columns: table.heads, rows: table.rows.map((row) => row.map(rawValue)) }))}>
      CSV
    </button>
  );
}

interface Order {
  column: number;
  down: boolean;
}

function TableView({ table, titled, tools }: { table: TableDocument; titled: boolean; tools?: ComponentChildren }) {
  const [order, setOrder] = useState<Order | null>(null);
  const [all, setAll] = useState(false);
  const { box, fit } = useFittingColumns(table.main, all);
  const columns = table.heads.map((_, at) => at).slice(0, all ? undefined : fit);
  const [long, setLong] = useState(false);
  const sorted = order === null ? table.rows : sortedRows(table.rows, order);
  const rows = long ? sorted : sorted.slice(0, ROWS_SHOWN);
  const turn = (column: number): void => setOrder(order?.column === column ? { column, down: !order.down } : { column, down: table.numeric[column] === true });
  return (
    <div class="report-table">
      {titled && <h3>{table.title}</h3>}
      {table.note !== "" && <p class="muted small">{table.note}</p>}
      <div class="scrolls" ref={box} tabIndex={0} role="region" aria-label={`Table: ${table.title}`}>
        <table>
          <thead>
            <tr>
              {columns.map((at) => (
                <th key={at} scope="col" class={table.numeric[at] ? "number" : ""} aria-sort={order?.column !== at ? undefined : order.down ? "descending" : "ascending"}>
                  <button type="button" onClick={() => turn(at)}>
                    {table.heads[at]}
                    {order?.column === at && <span aria-hidden="true">{order.down ? " ▾" : " ▴"}</span>}
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((row, line) => (
              <tr key={line}>
                {columns.map((at) => {
                  const cell = row[at] ?? "";
                  const full = typeof cell !== "string" && typeof cell[1] === "string" ? cell[1] : undefined;
                  return (
                    <td key={at} class={table.numeric[at] ? "number" : ""} title={full}>
                      {typeof cell === "string" ? cell : cell[0]}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {(long || sorted.length === rows.length) && table.more !== "" && <p class="muted small">{table.more}</p>}
      <div class="report-tools">
        {table.heads.length > fit && (
          <button type="button" class="quiet" aria-expanded={all} onClick={() => setAll(!all)}>
            {all ? "Show fewer columns" : `Show all ${table.heads.length} columns`}
          </button>
        )}
        {sorted.length > ROWS_SHOWN && (
          <button type="button" class="quiet" aria-expanded={long} onClick={() => setLong(!long)}>
            {long ? "Show fewer rows" : `Show all ${sorted.length} rows`}
          </button>
        )}
        {tools}
      </div>
    </div>
  );
}

/** How many of the first `most` columns fit into the box, at least two; counted again when the window's width changes. */
function useFittingColumns(most: number, all: boolean) {
  const box = useRef<HTMLDivElement>(null);
  const [shown, setShown] = useState({ most, fit: most });
  useEffect(() => {
    let width = innerWidth;
    const onResize = (): void => {
      if (innerWidth === width) return; // a phone's address bar changes the height alone
      width = innerWidth;
      setShown({ most, fit: most });
    };
    addEventListener("resize", onResize);
    return () => removeEventListener("resize", onResize);
  }, [most]);
  const fit = shown.most === most ? shown.fit : most;
  useLayoutEffect(() => {
    const element = box.current;
    if (all || element === null || element.scrollWidth <= element.clientWidth) return;
    const right = element.getBoundingClientRect().left + element.clientWidth + 1;
    const inside = [...element.querySelectorAll("thead th")].filter((head) => head.getBoundingClientRect().right <= right).length;
    const fewer = Math.max(2, inside);
    if (fewer < fit) setShown({ most, fit: fewer });
  }, [shown, all, most]);
  return { box, fit };
}

/** Rows by one column; unknown values are always last. */
export function sortedRows(rows: readonly Cell[][], { column, down }: Order): Cell[][] {
  const keyed = rows.map((row) => ({ row, key: sortKey(row[column] ?? "") }));
  keyed.sort((one, two) => {
    if (one.key === null || two.key === null) return Number(one.key === null) - Number(two.key === null);
    const order = typeof one.key === "number" && typeof two.key === "number" ? one.key - two.key : String(one.key).localeCompare(String(two.key), "en", { numeric: true });
    return down ? -order : order;
  });
  return keyed.map(({ row }) => row);
}

function sortKey(cell: Cell): number | string | null {
  const value = rawValue(cell);
  return value === "" ? null : value;
}

function rawValue(cell: Cell): number | string | null {
  return typeof cell === "string" ? cell : cell[1];
}
