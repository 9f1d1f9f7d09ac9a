/** Bars with names and values; an accessible list with a graphical bar in each item. */

import type { ComponentChildren } from "preact";
import { phaseProperty } from "./palette";
import "./bars.css";

export interface BarRow {
  name: ComponentChildren;
  key: string;
  value: number;
  text: string;
  /** The one in question: marked by a sign and weight, not only by color. */
  culprit?: boolean;
  phase?: string | undefined;
}

interface BarsProps {
  label: string;
  rows: readonly BarRow[];
  /** A line across all bars. */
  mark?: { value: number; name: string } | undefined;
  /** Value of the full width; default: the largest value. */
  most?: number | undefined;
}

export function Bars({ label, rows, mark, most }: BarsProps) {
  const top = Math.max(most ?? 0, mark?.value ?? 0, ...rows.map((row) => row.value), 0);
  const low = Math.min(0, ...rows.map((row) => row.value));
  const range = top - low || 1;
  const zero = (-low / range) * 100;
  return (
    <ul class="bar-list" aria-label={label}>
      {rows.map((row) => {
        const width = (Math.abs(row.value) / range) * 100;
        return (
          <li key={row.key} class={row.culprit ? "culprit" : ""}>
            <span class="bars-name">
              {row.culprit && <span aria-hidden="true">▸ </span>}
              {row.name}
            </span>
            <span class="bars-track" aria-hidden="true">
              <span
                class="bars-fill"
                style={{
                  left: `${row.value < 0 ? zero - width : zero}%`,
                  width: `${Math.max(width, row.value === 0 ? 0 : 0.5)}%`,
                  ...(row.phase === undefined ? {} : { background: `var(${phaseProperty(row.phase)})` }),
                }}
              />
              {mark !== undefined && <span class="bars-mark" title={mark.name} style={{ left: `${((mark.value - low) / range) * 100}%` }} />}
            </span>
            <span class="bars-value">{row.text}</span>
          </li>
        );
      })}
      {mark !== undefined && (
        <li class="bars-note">
          <span class="bars-key" aria-hidden="true" /> {mark.name}
        </li>
      )}
    </ul>
  );
}
