// The contract as a service in Node uses it: with the Lua scripts and ioredis, without a package of Oncegate's.
//
// Usage: node contract.js redis://host:port/db DIRECTORY
//        node contract.js redis-cluster://host:port,host:port DIRECTORY
// The directory has a file NAME.lua for each script (oncegate schema print redis NAME).

import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { readFileSync, readdirSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout } from 'node:timers/promises'
import { Cluster, Redis } from 'ioredis'

const LUA = process.argv[3]
const MINUTE = 60_000
const CALLER = Buffer.alloc(8)
const AUDIT = 'oncegate:{audit}'
const HOSTILE = `POST /orders'; return redis.call('FLUSHALL') -- " \\ {a} \u{1f4a3} \r\n$5\r\n`

// [docs:begin]
const scripts = Object.fromEntries(
  readdirSync(LUA).filter((name) => name.endsWith('.lua')).map((name) => {
    const code = readFileSync(join(LUA, name))
    return [name.slice(0, -4), { code, sha1: createHash('sha1').update(code).digest('hex') }]
  }),
)

async function call(client, name, keys, ...args) {
  const { code, sha1 } = scripts[name]
  try {
    return await client.evalshaBuffer(sha1, keys.length, ...keys, ...args)
  } catch (error) {
    if (!error.message.startsWith('NOSCRIPT')) throw error
    return await client.evalBuffer(code, keys.length, ...keys, ...args)
  }
}
// [docs:end]

const newKey = () => `oncegate:{${randomBytes(32).toString('hex')}}`
const newAttempt = () => randomBytes(16)
const texts = (reply) => reply.map((part) => part.toString())
const fields = async (client, key) => {
  const [, , ...found] = await call(client, 'lookup', [key])
  return Object.fromEntries(found.flatMap((name, at) => (at % 2 ? [] : [[name.toString(), found[at + 1]]])))
}

async function claim(client, key, attempt, body, { onAbandoned = 'park', lease = MINUTE, operation = HOSTILE } = {}) {
  const fingerprint = Buffer.concat([Buffer.of(1), createHash('sha256').update(body).digest()])
  return await call(client, 'claim', [key], attempt, fingerprint, lease, MINUTE, onAbandoned, CALLER, operation)
}

function response(status, headers, body) {
  const head = Buffer.alloc(7)
  head.writeUInt8(1, 0)
  head.writeUInt16BE(status, 1)
  head.writeUInt16BE(headers.length, 3)
  const fields = headers.flatMap(([name, value]) => {
    const lengths = Buffer.alloc(6)
    lengths.writeUInt16BE(Buffer.byteLength(name), 0)
    lengths.writeUInt32BE(Buffer.byteLength(value), 2)
    return [lengths, Buffer.from(name), Buffer.from(value)]
  })
  return Buffer.concat([head, ...fields, body])
}

function connect(url) {
  const hosts = url.match(/^redis-cluster:\/\/(.*)$/)?.[1]
  if (!hosts) return new Redis(url)
  return new Cluster(hosts.split(',').map((host) => ({ host: host.split(':')[0], port: Number(host.split(':')[1]) })))
}

// A connection to the server that has this key, because only that server serves its shard channel.
async function connectTo(client, key) {
  if (!(client instanceof Cluster)) return client.duplicate()
  const slot = Number(await client.cluster('KEYSLOT', key))
  const shards = await client.cluster('SLOTS')
  const [, , [host, port]] = shards.find(([first, last]) => first <= slot && slot <= last)
  return new Redis(port, host)
}

async function main(url) {
  const client = connect(url)
  const nodes = client instanceof Cluster ? (await once(client, 'ready'), client.nodes('master')) : [client]
  for (const node of nodes) await node.script('FLUSH')
  assert.deepEqual(
    Object.keys(scripts).sort(),
    ['audit', 'claim', 'complete', 'forget', 'lookup', 'release', 'renew', 'resolve', 'rewrite', 'step'],
  )
  const receipt = response(201, [['content-type', 'application/octet-stream']], Buffer.from([...Array(256).keys()]))

  // Uses so many records that each node of a Cluster has some, and has to load each script.
  for (let round = 0; round < 12; round += 1) {
    // Claim, conflict, mismatch, complete, replay.
    const [key, attempt] = [newKey(), newAttempt()]
    const listener = await connectTo(client, key)
    const heard = new Promise((resolve) => listener.on('smessage', (channel, message) => resolve([channel, message])))
    await listener.ssubscribe(key)
    const [word, now, token, attempts, leaseUntil, afterAbandoned] = texts(await claim(client, key, attempt, 'pay 5'))
    assert.deepEqual([word, attempts, afterAbandoned], ['execute', '1', '0'])
    assert.ok(Math.abs(Number(now) - Date.now()) < 60_000 && Number(token) >= Number(now))
    assert.equal(Number(leaseUntil), Number(now) + MINUTE)
    // The reply was lost. The repeated claim is the same claim.
    assert.equal(texts(await claim(client, key, attempt, 'pay 5'))[2], token)
    const [inProgress, , left] = texts(await claim(client, key, newAttempt(), 'pay 5'))
    assert.ok(inProgress === 'in-progress' && Number(left) > 0 && Number(left) <= MINUTE)
    assert.equal(texts(await claim(client, key, newAttempt(), 'pay 9'))[0], 'mismatch')
    assert.equal(texts(await call(client, 'renew', [key], token, MINUTE, MINUTE))[0], 'renewed')
    assert.equal((await fields(client, key)).operation.toString(), HOSTILE)
    const complete = async (token, reply) =>
      texts(await call(client, 'complete', [key], token, 'completed', MINUTE, reply))[0]
    assert.equal(await complete(String(BigInt(token) + 1n), receipt), 'fenced')
    assert.equal(await complete(token, receipt), 'completed')
    assert.equal(await complete(token, receipt), 'completed')
    assert.equal(await complete(token, Buffer.concat([receipt, receipt])), 'fenced')
    const again = await claim(client, key, newAttempt(), 'pay 5')
    assert.equal(again[0].toString(), 'replay')
    assert.ok(again[2].equals(receipt), 'byte for byte')
    assert.deepEqual(await Promise.race([heard, setTimeout(20_000, 'nothing heard', { ref: false })]), [key, `completed ${token}`])
    listener.disconnect()

    // The content is replaced by another form of it, and removed. The key stays protected.
    const newer = response(201, [], Buffer.from('another form'))
    const rewrite = async (...words) => texts(await call(client, 'rewrite', [key], ...words))
    const other = response(201, [], Buffer.from('a third form'))
    assert.deepEqual((await rewrite(token, newer, other, 0)).filter((_, n) => n !== 1), ['not-rewritten', 'completed'])
    assert.equal((await rewrite(token, receipt, newer, 0))[0], 'rewritten')
    assert.equal((await rewrite(token, receipt, newer, 0))[0], 'rewritten')
    assert.ok((await claim(client, key, newAttempt(), 'pay 5'))[2].equals(newer))
    const forgetting = client instanceof Cluster ? [key] : [key, AUDIT]
    const forgotten = texts(await call(client, 'forget', forgetting, 'ann', HOSTILE))
    assert.deepEqual([forgotten[0], ...forgotten.slice(2)], ['forgotten', 'completed', 'tombstone'])
    assert.equal(texts(await call(client, 'forget', forgetting, 'ann', HOSTILE))[0], 'not-forgotten')
    assert.equal(texts(await claim(client, key, newAttempt(), 'pay 5'))[0], 'unreplayable')
    assert.equal(texts(await claim(client, key, newAttempt(), 'pay 9'))[0], 'mismatch')

    // Abandoned: executed again with a greater token, and the stale owner is fenced.
    const second = newKey()
    const stale = texts(await claim(client, second, newAttempt(), 'a', { lease: 1 }))[2]
    await setTimeout(10)
    const taken = texts(await claim(client, second, newAttempt(), 'a', { onAbandoned: 'reexecute' }))
    assert.ok(taken[0] === 'execute' && BigInt(taken[2]) > BigInt(stale) && taken[5] === '1')
    assert.equal(texts(await call(client, 'complete', [second], stale, 'completed', MINUTE, receipt))[0], 'fenced')
    assert.equal(texts(await call(client, 'release', [second], taken[2], MINUTE))[0], 'released')
    const third = texts(await claim(client, second, newAttempt(), 'b'))
    assert.equal(third[3], '3')

    // A step outlives its attempt. With a step, a released key is not free for another request.
    assert.equal(texts(await call(client, 'step', [second], third[2], 0, 'charge', receipt))[0], 'recorded')
    assert.equal(texts(await call(client, 'step', [second], stale, 1, 'ship', ''))[0], 'fenced')
    assert.equal(texts(await call(client, 'release', [second], third[2], MINUTE))[0], 'released')
    assert.equal(texts(await claim(client, second, newAttempt(), 'c'))[0], 'mismatch')
    assert.equal(texts(await claim(client, second, newAttempt(), 'b'))[0], 'execute')
    assert.ok((await fields(client, second))['result:0'].equals(receipt))
  }

  // Abandoned: parked, resolved by an operator, recorded in the audit trail. On a Cluster, the trail may be on another node.
  const key = newKey()
  await claim(client, key, newAttempt(), 'a', { lease: 1 })
  await setTimeout(10)
  assert.equal(texts(await claim(client, key, newAttempt(), 'a'))[0], 'unknown')
  const isCluster = client instanceof Cluster
  const word = ['complete', MINUTE, 0, 0, 'ann', HOSTILE, receipt]
  const resolved = texts(await call(client, 'resolve', isCluster ? [key] : [key, AUDIT], ...word))
  assert.deepEqual([resolved[0], ...resolved.slice(2)], ['resolved', 'unknown', 'completed'])
  if (isCluster) {
    const said = [resolved[1], key.slice(10, -1), resolved[2], resolved[3], 'ann', HOSTILE, newAttempt().toString('hex')]
    const added = texts(await call(client, 'audit', [AUDIT], ...said))
    assert.equal(added[0], 'added')
    assert.deepEqual(texts(await call(client, 'audit', [AUDIT], ...said)), added)
  }
  const [[number, entry]] = await client.xrevrange(AUDIT, '+', '-', 'COUNT', 1)
  assert.ok(number.endsWith('-0') && entry.includes('ann') && entry.includes(HOSTILE) && entry.includes(key.slice(10, -1)))
  assert.ok((await claim(client, key, newAttempt(), 'a'))[2].equals(receipt))

  // Lookups, and refused calls.
  const found = texts(await call(client, 'lookup', [key], 'head'))
  assert.deepEqual([found[0], found[found.indexOf('state') + 1]], ['found', 'completed'])
  assert.equal(texts(await call(client, 'lookup', [newKey()]))[0], 'absent')
  const other = newKey()
  await client.set(other, 'something else')
  await assert.rejects(claim(client, other, newAttempt(), 'a'), /^ReplyError: CORRUPT/)
  await assert.rejects(claim(client, newKey(), HOSTILE, 'a'), /^ReplyError: INVALID/)
  await assert.rejects(call(client, 'claim', ["it's no record"], newAttempt(), 1), /^ReplyError: INVALID/)
  await assert.rejects(call(client, 'renew', [newKey()], '1', '1e3', MINUTE), /^ReplyError: INVALID/)
  await assert.rejects(claim(client, newKey(), newAttempt(), 'a', { lease: 0 }), /^ReplyError: INVALID/)
  assert.equal(await client.get(other), 'something else', 'nothing was flushed')
  client.disconnect()
  console.log('contract: all as it is written down')
}

await main(process.argv[2])
