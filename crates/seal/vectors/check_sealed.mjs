// A second implementation of sealed forms: opens and writes the examples of sealed.json with the cryptography of Node alone.
import { createCipheriv, createDecipheriv, createHmac, timingSafeEqual } from 'node:crypto'
import { readFileSync } from 'node:fs'
import assert from 'node:assert'

const file = JSON.parse(readFileSync(new URL('sealed.json', import.meta.url)))
const LABEL = 'oncegate-seal-1'
const MAGIC = Buffer.from('\0ogseal\x01', 'latin1')

/** HKDF-Expand of RFC 5869 with SHA-256, for at most 32 bytes. */
const derive = (key, info, length) =>
  createHmac('sha256', key).update(info).update(Buffer.from([1])).digest().subarray(0, length)

function u64(number) {
  const bytes = Buffer.alloc(8)
  bytes.writeBigUInt64BE(BigInt(number))
  return bytes
}

const u32 = (number) => { const bytes = Buffer.alloc(4); bytes.writeUInt32BE(number); return bytes }

/** Bytes after their length. */
const lp = (content) => Buffer.concat([u32(Buffer.byteLength(content)), Buffer.from(content)])

function context({ part, record, token, number, name, consumer, topic, names, stream, sequence }) {
  const parts = [Buffer.from(LABEL), Buffer.from([part]), record, u64(token)]
  if (part === 3) parts.push(u32(number), Buffer.from(name))
  // An entry of a client's journal: the name of its file.
  if (part === 4) parts.push(Buffer.from(name))
  // A dead letter: its consumer and its topic, and for its content the names of its headers.
  if (part === 5 || part === 6) parts.push(lp(consumer), lp(topic))
  if (part === 5) parts.push(u32(names.length), ...names.map(lp))
  // An event that a stream buffers: its consumer, its stream and its number.
  if (part === 7) parts.push(lp(consumer), lp(stream), u64(sequence))
  return Buffer.concat(parts)
}

const dataKey = (key, salt) => derive(key, Buffer.concat([Buffer.from(`${LABEL} data`), salt]), 32)

export function seal(key, place, plaintext) {
  const bound = context(place)
  const salt = createHmac('sha256', derive(key, `${LABEL} salt`, 32))
    .update(u64(bound.length)).update(bound).update(plaintext).digest()
  const cipher = createCipheriv('aes-256-gcm', dataKey(key, salt), Buffer.alloc(12)).setAAD(bound)
  const ciphertext = Buffer.concat([cipher.update(plaintext), cipher.final()])
  const head = [MAGIC, derive(key, `${LABEL} id`, 8), Buffer.from([place.part]), u64(place.token), salt]
  return Buffer.concat([...head, ciphertext, cipher.getAuthTag()])
}

export function open(keys, place, sealed) {
  if (sealed.length < 73 || !sealed.subarray(0, 8).equals(MAGIC)) throw new Error('not sealed in version 1')
  const id = sealed.subarray(8, 16)
  const key = keys.find((key) => timingSafeEqual(derive(key, `${LABEL} id`, 8), id))
  if (!key) throw new Error(`the key ${id.toString('hex')} is missing`)
  const [part, token] = [sealed[16], sealed.readBigUInt64BE(17)]
  const bound = context({ ...place, part, token })
  const cipher = createDecipheriv('aes-256-gcm', dataKey(key, sealed.subarray(25, 57)), Buffer.alloc(12))
  cipher.setAAD(bound).setAuthTag(sealed.subarray(-16))
  return Buffer.concat([cipher.update(sealed.subarray(57, -16)), cipher.final()])
}

const key = Buffer.from(file.key, 'hex')
const record = Buffer.from(file.record, 'hex')
assert.equal(derive(key, `${LABEL} id`, 8).toString('hex'), file.key_id)
assert.equal(`ogseal1_${file.key_id}_${file.key}`, file.key_text)
for (const example of file.parts) {
  const place = { ...example, record }
  const [plaintext, sealed] = [example.plaintext, example.sealed].map((text) => Buffer.from(text, 'hex'))
  assert.deepEqual(seal(key, place, plaintext), sealed)
  assert.deepEqual(open([Buffer.alloc(32), key], place, sealed), plaintext)
  assert.throws(() => open([key], { ...place, record: Buffer.alloc(32) }, sealed))
  assert.throws(() => open([Buffer.alloc(32)], place, sealed), /is missing/)
}
for (const example of file.intents) {
  const place = { part: 4, record: Buffer.alloc(32), token: 0, name: example.file }
  const [plaintext, sealed] = [example.plaintext, example.sealed].map((text) => Buffer.from(text, 'hex'))
  assert.deepEqual(seal(key, place, plaintext), sealed)
  assert.deepEqual(open([key], place, sealed), plaintext)
  assert.throws(() => open([key], { ...place, name: 'other.intent' }, sealed))
}
for (const example of file.dead_letters) {
  const { consumer, topic, header_names: names } = example
  const place = { part: 5, record: Buffer.from(example.id, 'hex'), token: 0, consumer, topic, names }
  const values = example.header_values.map((value) => lp(Buffer.from(value, 'hex')))
  const content = Buffer.concat([...values, Buffer.from(example.payload, 'hex')])
  const sealed = Buffer.from(example.sealed, 'hex')
  assert.deepEqual(seal(key, place, content), sealed)
  assert.deepEqual(open([key], place, sealed), content)
  assert.throws(() => open([key], { ...place, topic: 'other' }, sealed))
  const form = seal(key, { ...place, part: 6 }, Buffer.from(example.error))
  assert.equal(`ogseal:${form.toString('hex')}`, example.sealed_error)
  assert.equal(open([key], { ...place, part: 6 }, form).toString(), example.error)
}
for (const { consumer, stream, sequence, event, sealed } of file.stream_events) {
  const place = { part: 7, record: Buffer.alloc(32), token: 0, consumer, stream, sequence }
  const [plaintext, form] = [event, sealed].map((text) => Buffer.from(text, 'hex'))
  assert.deepEqual(seal(key, place, plaintext), form)
  assert.deepEqual(open([key], place, form), plaintext)
  assert.throws(() => open([key], { ...place, sequence: '4' }, form))
}
console.log(`${file.parts.length + file.intents.length + 2 * file.dead_letters.length + file.stream_events.length} sealed forms agree`)
