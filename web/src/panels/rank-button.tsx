/** `rank 3`, to be pressed: it is then the chosen rank everywhere; pressed again, none is. */

import type { OpenRun } from "../run/open-run";
import { tell } from "../ui/toast";

/** What is chosen stands further down, where it may not be seen: so it is said, too. */
export function chooseRank(run: OpenRun, rank: number): void {
  const before = run.rank.peek() === rank;
  run.rank.value = before ? null : rank;
  tell(before ? "No rank is chosen any more." : `Rank ${rank} is shown below.`);
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
