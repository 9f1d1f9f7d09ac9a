/** The nodes of a job, as returned by `/nodes`. */

export interface NodeRow {
  node: string;
  hosts: string[];
  ranks: number;
  live_ranks: number;
  /** First and last rank of each range of consecutive ranks. */
  rank_spans: [number, number][];
  number: number | null;
  address: string | null;
  offset_ns: number | null;
  rtt_ns: number | null;
  heard_wall_ns: number | null;
  refused: number;
  /** In words. */
  problems: string[];
  sample: Record<string, number | null> | null;
}

export interface NodesDocument {
  total: number;
  nodes: NodeRow[];
  refused: Record<string, number>;
}
