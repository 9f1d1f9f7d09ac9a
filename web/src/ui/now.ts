/** The time, for what says how old something is: it moves only while somebody looks. */

import { useEffect, useState } from "preact/hooks";

/** Milliseconds since 1970, anew every `everyMs`; 0: as it was. */
export function useNow(everyMs: number): number {
  const [now, setNow] = useState(() => Date.now());
  useEffect(() => {
    if (everyMs === 0) return;
    const tick = (): void => {
      if (!document.hidden) setNow(Date.now());
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
