// Time that has passed, by both clocks of the machine, whichever shows more: the monotonic clock stands still while the machine is
// suspended, and the wall clock may be set back.

/** A moment by both clocks, in milliseconds. */
export class Moment {
  private constructor(
    private readonly monotonic: number,
    private readonly wall: number,
  ) {}

  static now(): Moment {
    return new Moment(performance.now(), Date.now());
  }

  /** The milliseconds since this moment. */
  age(now = Moment.now()): number {
    return Math.max(now.monotonic - this.monotonic, now.wall - this.wall);
  }

  /** True if this moment is after another one of this process. */
  isAfter(other: Moment): boolean {
    return this.monotonic > other.monotonic;
  }
}

/** The time by which the event loop may be late, and the time after which the replies that came meanwhile have been read. */
const LATE_MS = 100;
const SETTLING_MS = 250;
const TICK_MS = 50;
const IDLE_MS = 10_000;

/** Notes if the event loop was blocked. Then time-outs say nothing of servers. */
class LoopWatch {
  private timer: NodeJS.Timeout | undefined;
  private due = 0;
  private lateAt = -Infinity;
  private usedAt = 0;

  /** Watches the loop for a while. */
  watch(now: number): void {
    this.usedAt = now;
    if (this.timer !== undefined) return;
    this.due = now + TICK_MS;
    this.timer = setInterval(() => { this.tick(performance.now()); }, TICK_MS);
    this.timer.unref();
  }

  private tick(now: number): void {
    if (now - this.due > LATE_MS) this.lateAt = now;
    this.due = now + TICK_MS;
    if (now - this.usedAt < IDLE_MS) return;
    clearInterval(this.timer);
    this.timer = undefined;
  }

  /** Returns true if the loop is blocked, or was a moment ago. */
  wasBlocked(now: number): boolean {
    return now - this.lateAt < SETTLING_MS || now - this.due > LATE_MS;
  }
}

export const LOOP = new LoopWatch();
