/** The time, for what says how old something is: it moves only while somebody looks. */

import { useEffect, useState } from "preact/hooks";

/** Milliseconds, anew every `everyMs`, 0: as it was; `clock`: what says them, since 1970 unless another is given. */
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
