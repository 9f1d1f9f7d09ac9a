/** The value of the cell under the pointer: as a tooltip, and read aloud for keyboard users. */

import { useSignal, useSignalEffect } from "@preact/signals";
import { useRef } from "preact/hooks";
import type { HeatControl } from "../charts/heat-control";
import type { Span } from "../charts/heat-picture";
import { cellWords, placeWords } from "../charts/heat-words";

const GAP = 14;
const HEAR_MS = 150;

export function HeatTip({ control, nodes }: { control: HeatControl; nodes: Span[] }) {
  const pointed = control.pointed.value;
  if (pointed === null) return null;
  const { cell, piece, x, y } = pointed;
  const width = control.heat.canvas.clientWidth;
  const node = nodes.length > 1 ? nodes.find((one) => cell.firstRank >= one.first && cell.lastRank <= one.last) : undefined;
  const across = x > width / 2 ? { right: `${width - x + GAP}px` } : { left: `${x + GAP}px` };
  return (
    <div class="heat-tip" style={{ ...across, top: `${Math.max(0, y - 20)}px` }} aria-hidden="true">
      <strong>{cellWords(cell, piece)}</strong>
      {placeWords(cell)}
      {node && <div>{node.name}</div>}
    </div>
  );
}

/** Announced when the keys come to rest, not for each cell on the way. */
export function HeatSpoken({ control }: { control: HeatControl }) {
  const words = useSignal("");
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useSignalEffect(() => {
    const pointed = control.pointed.value;
    clearTimeout(timer.current);
    if (pointed?.keyed) {
      timer.current = setTimeout(() => {
        words.value = `${placeWords(pointed.cell)}: ${cellWords(pointed.cell, pointed.piece)}`;
      }, HEAR_MS);
    }
    return () => clearTimeout(timer.current);
  });
  return (
    <p class="hidden" aria-live="polite">
      {words}
    </p>
  );
}
