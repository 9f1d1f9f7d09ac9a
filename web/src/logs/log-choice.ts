/** Which log of a run is shown where no rank is chosen. Pure. */

const MAIN = "logs/main.log";

export interface FileRow {
  path: string;
  size: number;
  changed_wall_ns: number;
}

/** Which of its logs says most: the main one unless it is empty; null: they are not listed. */
export function logOf(files: readonly FileRow[] | null): string {
  const logs = (files ?? []).filter((file) => file.path.startsWith("logs/") && file.path.endsWith(".log") && file.size > 0);
  if (logs.length === 0 || logs.some((file) => file.path === MAIN)) return MAIN;
  return logs.reduce((one, two) => (two.changed_wall_ns > one.changed_wall_ns ? two : one)).path;
}
