/** Which log of a run is shown if no rank is selected. Pure. */

const MAIN = "logs/main.log";

export interface FileRow {
  path: string;
  size: number;
  changed_wall_ns: number;
}

/** The main log unless it is empty, else the last changed one. `files` null: not listed yet. */
export function logOf(files: readonly FileRow[] | null): string {
  const logs = (files ?? []).filter((file) => file.path.startsWith("logs/") && file.path.endsWith(".log") && file.size > 0);
  if (logs.length === 0 || logs.some((file) => file.path === MAIN)) return MAIN;
  return logs.reduce((one, two) => (two.changed_wall_ns > one.changed_wall_ns ? two : one)).path;
}
