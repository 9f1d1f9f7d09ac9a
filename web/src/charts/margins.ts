/** Room beside what is drawn over steps: the same in all charts and the map, so that their steps lie below each other. */

const NARROW_PX = 520;

/** For the axis at the left; a narrow window has no room for a broad one. */
export function axisLeft(width: number): number {
  return width < NARROW_PX ? 60 : 68;
}

/** For half of the last step's number. */
export const RIGHT_PX = 20;
