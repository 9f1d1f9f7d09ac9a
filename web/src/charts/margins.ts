/** Margins of everything drawn over steps: equal in all charts and the map, so that their steps are aligned. */

const NARROW_PX = 520;

/** Space for the left axis; smaller in a narrow window. */
export function axisLeft(width: number): number {
  return width < NARROW_PX ? 60 : 68;
}

/** Space for half of the last step's label. */
export const RIGHT_PX = 20;
