/** A treemap: rectangles whose areas are proportional to sizes, as square as possible, filling a box without overlap. */

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

/**
 * One box for each size, in the same order; sizes of zero get no area. Rows are filled along the shorter side of what is
 * left, the largest first, as long as that makes them squarer (Bruls, Huizing, van Wijk: Squarified Treemaps).
 */
export function squarify(sizes: readonly number[], box: Box): Box[] {
  const found: Box[] = sizes.map(() => ({ x: box.x, y: box.y, width: 0, height: 0 }));
  const order = sizes.map((_, at) => at).filter((at) => (sizes[at] ?? 0) > 0);
  order.sort((one, two) => (sizes[two] ?? 0) - (sizes[one] ?? 0) || one - two);
  const total = order.reduce((sum, at) => sum + (sizes[at] ?? 0), 0);
  if (!(total > 0) || !(box.width > 0) || !(box.height > 0)) return found;
  const scale = (box.width * box.height) / total;
  let free = { ...box };
  for (let at = 0; at < order.length; ) {
    const side = Math.min(free.width, free.height);
    const row: number[] = [];
    let sum = 0;
    while (at < order.length) {
      const place = order[at] ?? 0;
      const area = (sizes[place] ?? 0) * scale;
      const largest = (sizes[row[0] ?? place] ?? 0) * scale;
      const last = (sizes[row.at(-1) ?? place] ?? 0) * scale;
      if (row.length > 0 && worst(largest, area, sum + area, side) > worst(largest, last, sum, side)) break;
      row.push(place);
      sum += area;
      at += 1;
    }
    free = laid(row.map((place) => [place, (sizes[place] ?? 0) * scale]), sum, free, at >= order.length, found);
  }
  return found;
}

/** The worst ratio of sides in a row whose areas are from `least` to `most`. */
function worst(most: number, least: number, sum: number, side: number): number {
  return Math.max((side * side * most) / (sum * sum), (sum * sum) / (side * side * least));
}

/** Place a row along the shorter side; returns what is left. The last row takes all of it, whatever was rounded. */
function laid(row: readonly (readonly [number, number])[], sum: number, free: Box, last: boolean, found: Box[]): Box {
  const upright = free.width >= free.height;
  const [long, side] = upright ? [free.width, free.height] : [free.height, free.width];
  const thick = last ? long : Math.min(long, sum / side);
  let along = 0;
  for (const [place, area] of row) {
    const length = sum > 0 ? (area / sum) * side : 0;
    found[place] = upright
      ? { x: free.x, y: free.y + along, width: thick, height: length }
      : { x: free.x + along, y: free.y, width: length, height: thick };
    along += length;
  }
  return upright
    ? { ...free, x: free.x + thick, width: free.width - thick }
    : { ...free, y: free.y + thick, height: free.height - thick };
}

/** Strips along the longer side of a box, in order, with areas proportional to the sizes. */
export function strips(sizes: readonly number[], box: Box): Box[] {
  const total = sizes.reduce((sum, size) => sum + Math.max(0, size), 0);
  let along = 0;
  return sizes.map((size) => {
    const share = total > 0 ? Math.max(0, size) / total : 0;
    const made =
      box.width >= box.height
        ? { x: box.x + along * box.width, y: box.y, width: share * box.width, height: box.height }
        : { x: box.x, y: box.y + along * box.height, width: box.width, height: share * box.height };
    along += share;
    return made;
  });
}
