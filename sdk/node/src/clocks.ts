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
