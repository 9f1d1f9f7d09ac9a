/** The layers as tables: the tree of modules with memory and time, and gradients by module. */

import { useSignal } from "@preact/signals";
import type { LayerRow, LayersDocument } from "../api/layer-documents";
import { count } from "../ui/format";
import { childrenOf, nameInside, titleOf } from "./layer-cells";
import { byHealth, HEALTH, kindProperty, notFinite, trained, type Health } from "./layer-figures";

/** Modules with at most this many inside are open at first. */
const OPEN_AT_MOST = 16;
const SHOWN = 12;
const HEADS: Readonly<Record<Health, string>> = { grad_norm: "Gradient norm", weight_norm: "Weight norm", update_ratio: "Update ratio", zero_share: "Zeros" };

interface Line {
  at: number;
  level: number;
  inside: number;
  open: boolean;
}

/** The visible rows of the tree, in its order. */
function linesOf(rows: readonly LayerRow[], children: readonly number[][], toggled: ReadonlySet<string>): Line[] {
  const lines: Line[] = [];
  const add = (at: number, level: number): void => {
    const inside = children[at] ?? [];
    const open = (level < 2 && inside.length <= OPEN_AT_MOST) !== toggled.has(rows[at]?.name ?? "");
    lines.push({ at, level, inside: inside.length, open });
    if (open) for (const one of inside) add(one, level + 1);
  };
  for (const [at, { parent }] of rows.entries()) if (parent < 0) add(at, 0);
  return lines;
}

export function LayerTable({ layers }: { layers: LayersDocument }) {
  const toggled = useSignal<ReadonlySet<string>>(new Set());
  const { modules: rows, kinds } = layers;
  const lines = linesOf(rows, childrenOf(rows), toggled.value);
  const timed = rows.some(({ forward_us, backward_us }) => forward_us !== null || backward_us !== null);
  const toggle = (name: string): void => {
    const next = new Set(toggled.value);
    if (!next.delete(name)) next.add(name);
    toggled.value = next;
  };
  return (
    <div class="scrolls layer-rows" tabIndex={0} role="region" aria-label="Table of layers">
      <table>
        <thead>
          <tr>
            <th scope="col">Module</th>
            <th scope="col" class="number">Total</th>
            <th scope="col" class="number">Share</th>
            {kinds.map(({ kind, title }) => (
              <th key={kind} scope="col" class="number">
                <span class="swatch" style={{ background: `var(${kindProperty(kind)})` }} /> {title}
              </th>
            ))}
            {timed && <th scope="col" class="number">Forward</th>}
            {timed && <th scope="col" class="number">Backward</th>}
          </tr>
        </thead>
        <tbody>
          {lines.map((line) => {
            const row = rows[line.at] as LayerRow;
            return (
              <tr key={row.name}>
                <th scope="row" style={{ paddingLeft: `${line.level * 14}px` }}>
                  <ModuleName row={row} outer={rows[row.parent]} line={line} onToggle={() => toggle(row.name)} />
                </th>
                <td class="number">{row.text.total_bytes}</td>
                <td class="number">{row.text.share}</td>
                {kinds.map(({ kind }) => (
                  <td key={kind} class="number">
                    {row.text.bytes[kind] ?? "–"}
                  </td>
                ))}
                {timed && <td class="number">{row.text.forward_us}</td>}
                {timed && <td class="number">{row.text.backward_us}</td>}
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function ModuleName({ row, outer, line, onToggle }: { row: LayerRow; outer: LayerRow | undefined; line: Line; onToggle: () => void }) {
  const name = nameInside(row, outer);
  const about = row.name === "" ? "" : row.type;
  if (line.inside === 0) {
    return (
      <span class="layer-name">
        {name} <span class="muted">{about}</span>
      </span>
    );
  }
  return (
    <button type="button" class="layer-name layer-fold" aria-expanded={line.open} onClick={onToggle}>
      <span aria-hidden="true">{line.open ? "▾" : "▸"}</span> {name} <span class="muted">{about}</span>
    </button>
  );
}

export function GradientTable({ layers }: { layers: LayersDocument }) {
  const by = useSignal<Health | null>(null);
  const up = useSignal(false);
  const all = useSignal(false);
  const rows = trained(layers.modules);
  const sorted = byHealth(rows, by.value, up.value);
  const shown = all.value ? sorted : sorted.slice(0, SHOWN);
  const columns = HEALTH.filter((name) => rows.some((row) => row[name] !== null));
  const sort = (column: Health): void => {
    up.value = by.value === column && !up.value;
    by.value = column;
  };
  return (
    <>
      <div class="scrolls layer-rows" tabIndex={0} role="region" aria-label="Gradients by layer">
        <table>
          <thead>
            <tr>
              <th scope="col">Module</th>
              {columns.map((column) => (
                <th key={column} scope="col" class="number" aria-sort={by.value !== column ? "none" : up.value ? "ascending" : "descending"}>
                  <button type="button" class="layer-by" onClick={() => sort(column)}>
                    {HEADS[column]}
                    <span aria-hidden="true">{by.value !== column ? "" : up.value ? " ▲" : " ▼"}</span>
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <tr key={row.name}>
                <th scope="row">
                  <span class="layer-name">
                    {titleOf(row)} <span class="muted">{row.name === "" ? "" : row.type}</span>
                  </span>
                </th>
                {columns.map((column) => (
                  <td key={column} class={notFinite(row[column]) ? "number layer-wrong" : "number"}>
                    {row.text[column]}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {sorted.length > SHOWN && (
        <button type="button" class="quiet" aria-expanded={all.value} onClick={() => (all.value = !all.value)}>
          {all.value ? "Show fewer" : `Show all ${count(sorted.length)}`}
        </button>
      )}
    </>
  );
}
