/** A `rank 3` button that selects the rank everywhere; pressed again, it deselects it. */

import type { OpenRun } from "../run/open-run";
import { reveal } from "../ui/card";
import { tell } from "../ui/toast";

/** Select the rank and scroll to it; pressed again, deselect it. */
export function chooseRank(run: OpenRun, rank: number): void {
  if (run.rank.peek() === rank) {
    run.rank.value = null;
    tell("No rank is selected.");
  } else showRank(run, rank);
}

export function showRank(run: OpenRun, rank: number): void {
  run.rank.value = rank;
  reveal(`rank-${rank}`);
}

export function RankButton({ run, rank }: { run: OpenRun; rank: number }) {
  const chosen = run.rank.value === rank;
  return (
    <button
      type="button"
      class="quiet rank-button"
      aria-pressed={chosen}
      aria-label={`Show rank ${rank}`}
      onClick={() => chooseRank(run, rank)}
    >
      rank {rank}
    </button>
  );
}
