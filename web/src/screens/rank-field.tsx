/** Select a rank by its number. */

import { useSignal } from "@preact/signals";
import type { OpenRun } from "../run/open-run";

export function RankField({ run }: { run: OpenRun }) {
  const typed = useSignal<string | null>(null);
  const most = Math.max(run.status.value?.ranks ?? 0, run.about.value?.world_size ?? 0);
  if (most < 2) return null;
  const choose = (text: string): void => {
    typed.value = text;
    if (text === "") run.rank.value = null;
    else if (/^\d+$/.test(text) && Number(text) < most) run.rank.value = Number(text);
  };
  const wrong = typed.value !== null && typed.value !== "" && String(run.rank.value) !== typed.value;
  return (
    <label class="rank-field">
      <span>Rank</span>
      <input
        data-search
        inputMode="numeric"
        autocomplete="off"
        size={String(most - 1).length + 4}
        placeholder={`0–${most - 1}`}
        aria-invalid={wrong}
        value={typed.value ?? run.rank.value ?? ""}
        onInput={(event) => choose(event.currentTarget.value.trim())}
        onFocus={(event) => event.currentTarget.select()}
        onBlur={() => (typed.value = null)}
        onKeyDown={(event) => {
          if (event.key === "Escape" || event.key === "Enter") event.currentTarget.blur();
        }}
      />
    </label>
  );
}
