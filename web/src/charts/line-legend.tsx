/** Legend of lines: color, dashes and name. */

import { lineLook } from "./curves";

export interface LegendLine {
  name: string;
  /** Index of its style; null: the median, in the text color. */
  look: number | null;
  /** Makes the entry a button. */
  onChoose?: () => void;
}

const STYLES = ["solid", "dashed", "dotted"];

export function LineLegend({ lines, label }: { lines: readonly LegendLine[]; label: string }) {
  return (
    <ul class="legend line-legend" aria-label={label}>
      {lines.map(({ name, look, onChoose }) => (
        <li key={name}>
          <span class="line-swatch" style={look === null ? { borderTopWidth: "3px", opacity: 0.6 } : swatch(look)} />
          {onChoose === undefined ? (
            name
          ) : (
            <button type="button" class="rank-link" onClick={onChoose}>
              {name}
            </button>
          )}
        </li>
      ))}
    </ul>
  );
}

function swatch(look: number): Record<string, string> {
  const { property, dash } = lineLook(look);
  return { borderTopColor: `var(${property})`, borderTopStyle: STYLES[dash === undefined ? 0 : dash[0] === 6 ? 1 : 2] ?? "solid" };
}
