/** Lets something that is no uPlot move its cursor together with the charts of a name. */

import uPlot from "uplot";

interface Client {
  pub: (type: string, from: uPlot, x: number, y: number, width: number, height: number, index: number) => void;
}

export interface CursorLink {
  /** Say where our cursor is; null: nowhere. */
  tell: (x: number | null) => void;
  close: () => void;
}

/** `heard`: where the charts' cursor is, by their x; null: nowhere. */
export function linkCursor(together: string, heard: (x: number | null) => void): CursorLink {
  const group = uPlot.sync(together);
  let telling = false;
  /** No cursor is shown: while the map is dragged that is said with every movement. */
  let nowhere = false;
  const client: Client = {
    pub: (type, from, x) => {
      if (telling) return;
      nowhere = false;
      if (type === "mouseleave" || x < 0) heard(null);
      else if (type === "mousemove") heard(from.posToVal(x, "x"));
    },
  };
  // uPlot calls nothing but `pub` of those who listen.
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
