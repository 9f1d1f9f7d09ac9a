/** The tooltip at the cursor, and the same as text for keyboard users. */

import type { Signal } from "@preact/signals";
import type { At, Frame } from "./plot-instance";

export interface Tip {
  title: string;
  rows: { name: string; value: string; color?: string; strong?: boolean }[];
  /** A last line, such as what a click does. */
  note?: string;
}

interface TipBoxProps {
  at: Signal<At | null>;
  frame: Signal<Frame | null>;
  read: (index: number) => Tip | null;
}

export function TipBox({ at, frame, read }: TipBoxProps) {
  const [place, where] = [at.value, frame.value];
  const tip = place === null ? null : read(place.index);
  if (place === null || where === null || tip === null) return null;
  const right = place.left > where.left + where.width * 0.55;
  const side = right ? { right: `calc(100% - ${place.left - 12}px)` } : { left: `${place.left + 12}px` };
  return (
    <div class="tip" style={{ ...side, top: `${where.top + 4}px` }} aria-hidden="true">
      <TipBody tip={tip} />
    </div>
  );
}

export function TipBody({ tip }: { tip: Tip }) {
  return (
    <>
      <p class="tip-title">{tip.title}</p>
      <table>
        <tbody>
          {tip.rows.map((row) => (
            <tr key={row.name} class={row.strong ? "strong" : ""}>
              <td>{row.color !== undefined && <span class="swatch" style={{ background: row.color }} />}</td>
              <td>{row.name}</td>
              <td class="number">{row.value}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {tip.note !== undefined && <p class="tip-note">{tip.note}</p>}
    </>
  );
}

export function tipWords(tip: Tip): string {
  return `${tip.title}: ${tip.rows.map((row) => `${row.name} ${row.value}`).join(", ")}`;
}
