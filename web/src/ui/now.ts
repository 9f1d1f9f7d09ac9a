/** The current time, for displayed ages; updated only while the page is visible. */

import { useEffect, useState } from "preact/hooks";

/** Milliseconds, updated every `everyMs` (0: never). `clock`: the source, by default the time since 1970. */
export function useNow(everyMs: number, clock: () => number = Date.now): number {
  const [now, setNow] = useState(clock);
  useEffect(() => {
    if (everyMs === 0) return;
    const tick = (): void => {
      if (!document.hidden) setNow(clock());
    };
    const timer = setInterval(tick, everyMs);
    document.addEventListener("visibilitychange", tick);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", tick);
    };
  }, [everyMs]);
  return now;
}
