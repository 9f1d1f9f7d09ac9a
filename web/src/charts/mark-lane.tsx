/** The marks above a chart: buttons over their steps, with shape and color by severity, and their text. */

import type { Signal } from "@preact/signals";
import { useSignal } from "@preact/signals";
import type { Frame } from "./plot-instance";
import { placed, type Mark } from "./marks";

const ROW_PX = 22;
const LEAST_PX = 22;
const MOST_ROWS = 4;
const SHAPES: Record<Mark["tone"], string> = { critical: "✖", warning: "▲", info: "●", event: "◆" };
const WORDS: Record<Mark["tone"], string> = { critical: "Critical", warning: "Warning", info: "Note", event: "Event" };

export function MarkLane({ marks, frame, height }: { marks: readonly Mark[]; frame: Signal<Frame | null>; height: number }) {
  const over = useSignal<string | null>(null);
  const where = frame.value;
  if (where === null || marks.length === 0) return null;
  const { marks: shown, left } = placed(marks, [where.least, where.most], LEAST_PX / Math.max(where.width, LEAST_PX), MOST_ROWS);
  if (shown.length === 0) return null;
  const rows = 1 + Math.max(...shown.map(({ row }) => row));
  const held = shown.find(({ mark }) => mark.key === over.value);
  return (
    <>
      <ul class="marks" aria-label="Found at these steps" style={{ height: `${rows * ROW_PX}px`, marginLeft: `${where.left}px`, width: `${where.width}px` }}>
        {shown.map(({ mark, row, from, to, cutFrom, cutTo }) => (
          <li key={mark.key} style={{ left: `${from * 100}%`, width: `${(to - from) * 100}%`, top: `${row * ROW_PX}px` }}>
            <button
              type="button"
              class={`mark-flag ${mark.tone}${cutFrom ? " cut-from" : ""}${cutTo ? " cut-to" : ""}`}
              title={mark.title}
              onMouseEnter={() => (over.value = mark.key)}
              onMouseLeave={() => (over.value = null)}
              onFocus={() => (over.value = mark.key)}
              onBlur={() => (over.value = null)}
              onClick={mark.onChoose}
              aria-label={`${WORDS[mark.tone]}, ${stretch(mark)}: ${mark.title}`}
            >
              <span aria-hidden="true" class="mark-shape">
                {SHAPES[mark.tone]}
              </span>
              <span aria-hidden="true" class="mark-words">
                {mark.title}
              </span>
            </button>
          </li>
        ))}
      </ul>
      {left > 0 && <p class="marks-left muted">{`and ${left} more, listed with the verdict`}</p>}
      {held !== undefined && (
        <div
          class={`mark-band ${held.mark.tone}`}
          style={{
            left: `${where.left + held.from * where.width}px`,
            width: `${(held.to - held.from) * where.width}px`,
            bottom: `${height - where.top - where.height}px`,
            height: `${where.height}px`,
          }}
        />
      )}
    </>
  );
}

function stretch({ first, last }: Mark): string {
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
}
