/** Synchronizes the cursor of a non-uPlot element with the charts of a sync group. */

import uPlot from "uplot";

interface Client {
  pub: (type: string, from: uPlot, x: number, y: number, width: number, height: number, index: number) => void;
}

export interface CursorLink {
  /** Publish our cursor position; null: none. */
  tell: (x: number | null) => void;
  close: () => void;
}

/** `heard`: called with the x of the charts' cursor; null: none. */
export function linkCursor(together: string, heard: (x: number | null) => void): CursorLink {
  const group = uPlot.sync(together);
  let telling = false;
  /** No cursor is shown; dragging the map would otherwise publish this with every movement. */
  let nowhere = false;
  const client: Client = {
    pub: (type, from, x) => {
      if (telling) return;
      nowhere = false;
      if (type === "mouseleave" || x < 0) heard(null);
      else if (type === "mousemove") heard(from.posToVal(x, "x"));
    },
  };
  // uPlot only calls `pub` on its subscribers.
  const listener = client as unknown as uPlot;
  group.sub(listener);
  return {
    tell: (x) => {
      if (x === null && nowhere) return;
      nowhere = x === null;
      telling = true;
      for (const plot of group.plots) {
        if (plot !== listener) plot.setCursor({ left: x === null ? -10 : plot.valToPos(x, "x"), top: x === null ? -10 : plot.over.clientHeight / 2 });
      }
      telling = false;
    },
    close: () => group.unsub(listener),
  };
}
