// The numbers of the kinds of action, as packed arrays hold them.
export const F = 0;
export const B = 1;
export const I = 2;
export const W = 3;
export const SEND_F = 4;
export const RECV_F = 5;
export const SEND_B = 6;
export const RECV_B = 7;
export const UNSHARD = 8;
export const RESHARD = 9;
export const REDUCE_GRAD = 10;
export const WAIT_SEND_F = 12;
export const WAIT_SEND_B = 13;
export const WAIT_REDUCE_GRAD = 14;
export const OFFLOAD = 15;
export const RELOAD = 16;
export const S = 17;
export const T = 18;
export const BROADCAST = 19;
export const COMBINE = 20;

/** Occupies the rank's compute lane: the computation of a stage, or of a rank's share of a spread vocabulary. */
export const isCompute = (kind: number): boolean => kind <= W || kind === S || kind === T;
/** Joins a collective of all ranks. */
export const isJoin = (kind: number): boolean => kind === BROADCAST || kind === COMBINE;
/** Of a vocabulary that is spread over the ranks: stands on every rank once per microbatch. */
export const isSpread = (kind: number): boolean => kind >= S && kind <= COMBINE;
export const isSend = (kind: number): boolean => kind === SEND_F || kind === SEND_B;
export const isReceive = (kind: number): boolean => kind === RECV_F || kind === RECV_B;
export const isSendWait = (kind: number): boolean => kind === WAIT_SEND_F || kind === WAIT_SEND_B;
/** Waits for a send or a reduction of its own rank. */
export const isWait = (kind: number): boolean => isSendWait(kind) || kind === WAIT_REDUCE_GRAD;
/** Moves an activation to host memory, or back. */
export const isCopy = (kind: number): boolean => kind === OFFLOAD || kind === RELOAD;
/** Whether an action of this kind belongs to one microbatch; the others belong to a whole stage. */
export const hasMicrobatch = (kind: number): boolean => kind <= RECV_B || isSendWait(kind) || isCopy(kind) || isSpread(kind);
