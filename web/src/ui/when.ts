/** Points in time in words. */

const DAY_MS = 86_400_000;
// Created once: creating a formatter takes longer than formatting hundreds of dates.
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const DAY_AND_YEAR = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

/** When a run started, for a list: recent days by name, the year only if it is not this year. */
export function began(wallNs: number, nowMs: number): string {
  const when = new Date(wallNs / 1e6);
  const now = new Date(nowMs);
  const clock = CLOCK.format(when);
  const days = Math.round((midnight(now) - midnight(when)) / DAY_MS);
  if (days === 0) return `today, ${clock}`;
  if (days === 1) return `yesterday, ${clock}`;
  const sameYear = when.getFullYear() === now.getFullYear();
  return `${(sameYear ? DAY : DAY_AND_YEAR).format(when)}, ${clock}`;
}

function midnight(when: Date): number {
  return new Date(when.getFullYear(), when.getMonth(), when.getDate()).getTime();
}
