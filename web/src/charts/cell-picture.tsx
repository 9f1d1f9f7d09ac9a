/**
 * Nested rectangles as a picture (a treemap or an icicle): tooltip, keys, and a click that goes into one of them.
 *
 * Arrow keys move between the rectangles, which are announced; Enter goes into one, Escape back.
 */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { cellAt, FONT_PX, labelsOf, neighbor, type Cell } from "./cells";
import "./cell-picture.css";
import { TipBody, tipWords, type Tip } from "./tip";

interface CellPictureProps {
  /** Accessible description in a sentence. */
  label: string;
  /** `treemap` or `icicle`, for screen readers. */
  role: string;
  height: number;
  /** The cells for a width in pixels. */
  make: (width: number) => Cell[];
  deps: readonly unknown[];
  tip: (cell: Cell) => Tip;
  /** Go into a cell; called with the cells from the outermost to the one that was chosen. */
  onEnter: (path: readonly Cell[]) => void;
  onLeave: () => void;
}

const OUTLINES = [0, 3, 2, 1];
const GAP_PX = 12;

export function CellPicture({ label, role, height, make, deps, tip, onEnter, onLeave }: CellPictureProps) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const [chosen, setChosen] = useState(-1);
  const [pointed, setPointed] = useState(-1);
  const cells = useMemo(() => (width > 0 ? make(width) : []), [width, height, ...deps]);
  // There may be thousands, which stay the same while the pointer moves.
  const drawn = useMemo(() => <Drawing cells={cells} />, [cells]);
  useEffect(() => {
    const element = box.current;
    if (element === null) return;
    const size = new ResizeObserver(() => setWidth(element.clientWidth));
    size.observe(element);
    return () => size.disconnect();
  }, []);
  useEffect(() => {
    setChosen(-1);
    setPointed(-1);
  }, [cells]);

  const enter = (at: number): void => {
    const path: Cell[] = [];
    for (let up = at; up >= 0; up = cells[up]?.parent ?? -1) path.unshift(cells[up] as Cell);
    if (path.length > 0) onEnter(path);
  };
  const at = (event: MouseEvent): number => {
    const place = box.current?.getBoundingClientRect();
    return place === undefined ? -1 : cellAt(cells, event.clientX - place.left, event.clientY - place.top);
  };
  const pressed = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow")) setChosen(neighbor(cells, chosen, event.key));
    else if (event.key === "Enter" && chosen >= 0) enter(chosen);
    else if (event.key === "Escape") chosen >= 0 ? setChosen(-1) : onLeave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const shown = cells[pointed] ?? cells[chosen];
  const current = cells[chosen];
  return (
    <div
      ref={box}
      class="cell-picture"
      role="application"
      aria-roledescription={role}
      aria-label={`${label} Arrow keys move, Enter goes inside, Escape goes back.`}
      tabIndex={0}
      style={{ height: `${height}px` }}
      onKeyDown={pressed}
      onBlur={() => setChosen(-1)}
      onPointerMove={(event) => setPointed(at(event))}
      onPointerLeave={() => setPointed(-1)}
      onClick={(event) => enter(at(event))}
    >
      {width > 0 && (
        <svg width={width} height={height} aria-hidden="true">
          {drawn}
          {shown !== undefined && <rect class="cell-shown" {...shown.box} />}
        </svg>
      )}
      {shown !== undefined && <CellTip cell={shown} tip={tip(shown)} width={width} />}
      <p class="hidden" aria-live="polite">
        {current === undefined ? "" : tipWords(tip(current))}
      </p>
    </div>
  );
}

function Drawing({ cells }: { cells: readonly Cell[] }) {
  return (
    <g>
      {cells.map((cell, place) => cell.property !== null && <rect key={place} class="cell" {...cell.box} style={{ fill: `var(${cell.property})` }} />)}
      {cells.map((cell, place) => cell.property === null && cell.level > 0 && <rect key={place} class="cell-outline" {...cell.box} style={{ strokeWidth: OUTLINES[Math.min(cell.level, 3)] }} />)}
      {labelsOf(cells).map(({ cell, x, y, text }) => (
        <text key={cell} x={x} y={y} style={{ fontSize: `${FONT_PX}px` }}>
          {text}
        </text>
      ))}
    </g>
  );
}

function CellTip({ cell, tip, width }: { cell: Cell; tip: Tip; width: number }) {
  const { x, y, width: wide } = cell.box;
  const middle = x + wide / 2;
  const side = middle > width / 2 ? { right: `${width - Math.min(width, middle) + GAP_PX}px` } : { left: `${middle + GAP_PX}px` };
  return (
    <div class="tip cell-tip" style={{ ...side, top: `${y + GAP_PX}px` }} aria-hidden="true">
      <TipBody tip={tip} />
    </div>
  );
}
