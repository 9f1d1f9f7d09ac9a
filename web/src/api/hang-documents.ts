/** A hang, as returned by `/hangs` (docs/schema.md, hangs/HOST-N.json), as far as the page shows it. */

import type { HangText } from "./text-documents";

export interface Hang {
  number: number;
  host: string;
  kind: string;
  title: string;
  declared_wall_ns: number;
  stopped_wall_ns: number;
  undecidable: boolean;
  /** The wait cycle of a deadlock: sentences, the last of which closes it. */
  cycle: string[];
  evidence: string[];
  over: "recovered" | "ended" | "aborted" | null;
  action: string;
  hosts: string[];
  parts: { host: string; number: number; kind: string; title: string }[];
  file: string;
  text: HangText;
}

export interface HangsDocument {
  hangs: Hang[];
  unread: string[];
}
