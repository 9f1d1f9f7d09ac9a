/** A `rank 3` button that selects the rank everywhere; pressed again, it deselects it. */

import type { OpenRun } from "../run/open-run";
import { tell } from "../ui/toast";

/** The selected rank is shown further down, possibly out of view, so confirm with a toast. */
export function chooseRank(run: OpenRun, rank: number): void {
  const before = run.rank.peek() === rank;
  run.rank.value = before ? null : rank;
  tell(before ? "No rank is selected." : `Rank ${rank} is shown below.`);
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
