/**
 * Hands a trace to ui.perfetto.dev in another tab.
 *
 * That page answers `PING` with `PONG` once it is ready, and then takes the trace as a message. Nothing is sent over the
 * network: both pages are in the same browser.
 */

export const PERFETTO = "https://ui.perfetto.dev";
const PING_MS = 50;
/** Loading it takes seconds with a slow connection. */
const MOST_PINGS = 1200;

/** Call it during a click. null: the browser blocked the tab. */
export function openPerfetto(): Window | null {
  return window.open(PERFETTO);
}

/** Whether Perfetto took the trace. */
export async function handOver(tab: Window, trace: Blob, title: string): Promise<boolean> {
  const buffer = await trace.arrayBuffer();
  if (!(await ready(tab))) return false;
  const name = `${title}.json.gz`;
  tab.postMessage({ perfetto: { buffer, title, fileName: name } }, PERFETTO, [buffer]);
  return true;
}

function ready(tab: Window): Promise<boolean> {
  return new Promise((done) => {
    let pings = 0;
    const over = (answered: boolean): void => {
      clearInterval(timer);
      removeEventListener("message", hear);
      done(answered);
    };
    const hear = (event: MessageEvent): void => {
      if (event.source === tab && event.origin === PERFETTO && event.data === "PONG") over(true);
    };
    const timer = setInterval(() => {
      pings += 1;
      if (tab.closed || pings > MOST_PINGS) over(false);
      else tab.postMessage("PING", PERFETTO);
    }, PING_MS);
    addEventListener("message", hear);
  });
}
