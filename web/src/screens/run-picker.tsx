/** Choose a run; the list is loaded when the field gets focus or the pointer. */

import { useSignal } from "@preact/signals";
import type { RunRow } from "../api/documents";
import type { RunsDocument } from "../api/history-documents";
import type { Source } from "../api/source";

const MOST = 200;

interface RunPickerProps {
  source: Source;
  /** The chosen run; empty: none yet. */
  now: string;
  /** Its name, until the list is loaded. */
  name?: string;
  label: string;
  onPick: (id: string) => void;
}

export function RunPicker({ source, now, name = now, label, onPick }: RunPickerProps) {
  const rows = useSignal<RunRow[] | null>(null);
  const load = (): void => {
    if (rows.value !== null) return;
    source.get<RunsDocument>("runs", { limit: MOST }).then(
      (found) => {
        rows.value = found.runs;
      },
      () => undefined, // the current run stays selectable
    );
  };
  return (
    <label class="run-picker">
      <span class="muted">{label}</span>{" "}
      <select value={now} onFocus={load} onPointerEnter={load} onChange={(event) => onPick(event.currentTarget.value)}>
        {!rows.value?.some((row) => row.id === now) && <option value={now}>{name || "choose …"}</option>}
        {rows.value?.map((row) => (
          <option key={row.id} value={row.id}>
            {row.folder ? `${row.name} (${row.folder})` : row.name}
          </option>
        ))}
      </select>
    </label>
  );
}
