// The contract as a service in Node uses it: with pg and SQL, without a package of Oncegate's. Argument: the database's URL.

import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import pg from 'pg'

const FINGERPRINT = Buffer.concat([Buffer.from([1]), Buffer.alloc(32, 'f')])
const OTHER_FINGERPRINT = Buffer.concat([Buffer.from([1]), Buffer.alloc(32, 'g')])
const HOSTILE = `POST /payments'; DROP SCHEMA oncegate CASCADE; -- " \\ $1 {} \u{1f4a3}`

async function claim(db, record, { fingerprint = FINGERPRINT, leaseMs = 30_000, onAbandoned = 'park', attempt } = {}) {
  const { rows } = await db.query(
    'SELECT * FROM oncegate.claim($1, $2, $3, $4, $5, on_abandoned => $6, operation => $7)',
    [record, attempt ?? randomBytes(16), fingerprint, leaseMs, 60_000, onAbandoned, HOSTILE],
  )
  return rows[0]
}

// One business transaction: the effect, then the completion as its last statement.
async function pay(client, record, token, amount, response = null) {
  await client.query('BEGIN')
  try {
    await client.query('INSERT INTO payments VALUES ($1)', [amount])
    await client.query('SELECT oncegate.complete($1, $2, $3)', [record, token, response])
    await client.query('COMMIT')
  } catch (error) {
    await client.query('ROLLBACK')
    throw error
  }
}

async function total(db) {
  return Number((await db.query('SELECT coalesce(sum(amount), 0) AS sum FROM payments')).rows[0].sum)
}

async function main(url) {
  const [db, app] = [new pg.Client(url), new pg.Client(url)]
  await Promise.all([db.connect(), app.connect()])
  await db.query('CREATE TABLE payments (amount integer NOT NULL)')

  // Executes once. The response commits with the rows, and is replayed byte for byte.
  let record = randomBytes(32)
  const attempt = randomBytes(16)
  const granted = await claim(db, record, { attempt })
  assert.equal(granted.outcome, 'execute')
  // pg returns a bigint as text. A token is sent back unchanged.
  assert.equal(granted.attempts, '1')
  assert.match(granted.token, /^[1-9][0-9]*$/)
  // The reply was lost. The repeated claim is the same claim.
  assert.equal((await claim(db, record, { attempt })).token, granted.token)
  const waiting = await claim(db, record)
  assert.equal(waiting.outcome, 'in-progress')
  assert.ok(Number(waiting.lease_left_ms) > 0 && Number(waiting.lease_left_ms) <= 30_000)
  assert.equal((await claim(db, record, { fingerprint: OTHER_FINGERPRINT })).outcome, 'mismatch')
  const body = Buffer.concat([Buffer.from(HOSTILE), Buffer.from([...Array(256).keys()])])
  const made = await db.query('SELECT oncegate.response(201, $1, $2, $3) AS response', [
    ['Content-Type', 'X-Note'],
    ['application/octet-stream', `it's "{quoted}", \\ and NULL`],
    body,
  ])
  const response = made.rows[0].response
  await pay(app, record, granted.token, 5, response)
  const replay = await claim(db, record)
  assert.equal(replay.outcome, 'replay')
  assert.ok(replay.response.equals(response) && response.subarray(-body.length).equals(body))
  assert.equal((await claim(db, record, { fingerprint: OTHER_FINGERPRINT })).outcome, 'mismatch')
  assert.equal(await total(db), 5)

  // A second run with the same token is rolled back: an attempt commits once.
  await assert.rejects(pay(app, record, granted.token, 5, response), { code: 'OG001' })
  assert.equal(await total(db), 5)

  // A stale owner gets an error, and its rows are rolled back.
  record = randomBytes(32)
  const stale = await claim(db, record, { leaseMs: 1 })
  let taken
  do {
    taken = await claim(db, record, { onAbandoned: 'reexecute' })
  } while (taken.outcome === 'in-progress')
  assert.equal(taken.outcome, 'execute')
  assert.ok(taken.after_abandoned && BigInt(taken.token) > BigInt(stale.token))
  await assert.rejects(pay(app, record, stale.token, 100), { code: 'OG001' })
  assert.equal(await total(db), 5)

  // While the owner's transaction is open, other callers are answered at once.
  await app.query('BEGIN')
  await app.query('INSERT INTO payments VALUES (7)')
  await app.query('SELECT oncegate.complete($1, $2)', [record, taken.token])
  assert.equal((await claim(db, record)).outcome, 'in-progress')
  const renewed = await db.query('SELECT * FROM oncegate.renew($1, $2, 30000, 60000)', [record, taken.token])
  assert.equal(renewed.rows[0].outcome, 'locked')
  await app.query('COMMIT')
  assert.equal((await claim(db, record)).outcome, 'unreplayable')
  assert.equal(await total(db), 12)

  // Without a completion the outcome is unknown. A rollback leaves the record unchanged.
  record = randomBytes(32)
  const mine = await claim(db, record)
  await app.query('BEGIN')
  await app.query('SELECT oncegate.complete($1, $2)', [record, mine.token])
  await app.query('ROLLBACK')
  assert.equal((await claim(db, record)).outcome, 'in-progress')
  const freed = await db.query('SELECT * FROM oncegate.release($1, $2, 60000)', [record, mine.token])
  assert.equal(freed.rows[0].outcome, 'released')
  const second = await claim(db, record)
  assert.equal(second.attempts, '2')

  // Steps outlive their attempt. With steps, a released key is not free for another request.
  const step = async (token, number, name, done) =>
    (await db.query('SELECT * FROM oncegate.step($1, $2, $3, $4, $5)', [record, token, number, name, done])).rows[0].outcome
  assert.equal(await step(second.token, 0, 'charge', body), 'recorded')
  assert.equal(await step(second.token, 0, 'charge', body), 'recorded')
  assert.equal(await step(second.token, 0, HOSTILE, body), 'differs')
  assert.equal(await step(second.token, 2, 'ship', body), 'differs')
  assert.equal(await step(mine.token, 1, 'ship', body), 'fenced')
  await db.query('SELECT * FROM oncegate.release($1, $2, 60000)', [record, second.token])
  assert.equal((await claim(db, record, { fingerprint: OTHER_FINGERPRINT })).outcome, 'mismatch')
  const third = await claim(db, record)
  assert.equal(third.outcome, 'execute')
  const steps = (await db.query('SELECT * FROM oncegate.lookup($1)', [record])).rows[0]
  assert.deepEqual([steps.token, steps.step_names], [third.token, ['charge']])
  assert.ok(steps.step_results[0].equals(body))

  // Hostile input is stored as data or refused, and changes nothing else.
  const found = await db.query('SELECT * FROM oncegate.lookup($1)', [record])
  assert.equal(found.rows[0].operation, HOSTILE)
  for (const wrong of [Buffer.from(HOSTILE), Buffer.alloc(31), Buffer.alloc(33), Buffer.alloc(0)]) {
    await assert.rejects(claim(db, wrong), { code: '22023' })
    await assert.rejects(claim(db, randomBytes(32), { fingerprint: wrong.subarray(0, 20) }), { code: '22023' })
  }
  await assert.rejects(claim(db, randomBytes(32), { onAbandoned: HOSTILE }), { code: '22023' })
  await assert.rejects(claim(db, randomBytes(32), { leaseMs: -1 }), { code: '22023' })
  await assert.rejects(db.query('SELECT oncegate.complete($1, $2, $3)', [record, '1', body]), { code: /^(22023|OG001)$/ })
  assert.equal((await db.query('SELECT oncegate.contract_version() AS version')).rows[0].version, 1)

  await Promise.all([db.end(), app.end()])
  console.log('ok')
}

await main(process.argv[2])
