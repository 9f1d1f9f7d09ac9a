/** Points in time and durations in words. */

const DAY_MS = 86_400_000;
// Created once: creating a formatter takes longer than formatting hundreds of dates.
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const DAY_AND_YEAR = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

/** `12 s`, `3 min`, `2 h`: one unit is enough for how old something is. */
export function roughly(ms: number): string {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 90) return `${seconds} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129_600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} days`;
}

/** How long something takes, to the second: `21 s`, `3 min 4 s`, `2 h 5 min`, `3 d 4 h`. */
export function elapsed(ms: number): string {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  const [days, hours, minutes] = [Math.floor(seconds / 86_400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (days > 0) return `${days} d ${hours} h`;
  if (hours > 0) return `${hours} h ${minutes} min`;
  return minutes > 0 ? `${minutes} min ${seconds % 60} s` : `${seconds} s`;
}

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
