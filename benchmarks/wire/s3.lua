-- What S3 adds to WebDAV: conditional PUT, one metadata item, LIST, and a delay that stands for distance.
-- `objects` has what is there ("size owner"); `claims` what a conditional PUT has reserved while its body is under way.
local M = {}
local objects, claims = ngx.shared.objects, ngx.shared.claims

local function wanted_bytes(method, key)
    if method == 'PUT' then return tonumber(ngx.var.content_length) or 0 end
    if method ~= 'GET' then return 0 end
    local first, last = (ngx.var.http_range or ''):match('^bytes=(%d+)-(%d+)$')
    if first then return last - first + 1 end
    return tonumber((objects:get(key) or '0 '):match('^%d+')) or 0
end

-- nginx's limit_rate lets the first second's worth of bytes pass unchecked, which is more than a chunk has, and
-- cannot slow uploads at all. So the time on a slow line is waited for before the body moves: both ways the same.
local function wait(method, key)
    local latency_s, bytes_per_s = tonumber(ngx.var.latency_s), tonumber(ngx.var.bytes_per_s)
    local line_s = bytes_per_s > 0 and wanted_bytes(method, key) / bytes_per_s or 0
    if latency_s + line_s > 0 then ngx.sleep(latency_s + line_s) end
end

local function refuse(status, code)
    ngx.status = status
    ngx.header.content_type = 'application/xml'
    ngx.print('<Error><Code>', code, '</Code></Error>')
    return ngx.exit(status)
end

function M.name() ngx.req.set_uri('/' .. ngx.md5(ngx.var.key)) end

function M.access()
    local method, key = ngx.req.get_method(), ngx.var.key
    wait(method, key)
    if method == 'PUT' then
        if ngx.var.http_if_none_match == '*' then
            if not claims:add(key, '') then return refuse(412, 'PreconditionFailed') end
            ngx.ctx.claimed = key
            if objects:get(key) then return refuse(412, 'PreconditionFailed') end
        end
    elseif method == 'HEAD' then
        ngx.var.owner = (objects:get(key) or ''):match('^%d+ (.+)$') or ''
    elseif ngx.var.http_range and (objects:get(key) or ''):match('^0 ') then
        return refuse(416, 'InvalidRange')  -- nginx sends an empty file whole
    end
end

-- Runs when the file has its name and before the client hears of it.
function M.answered()
    local method, key, status = ngx.req.get_method(), ngx.var.key, ngx.status
    if method == 'PUT' and (status == 201 or status == 204) then
        objects:set(key, (ngx.var.content_length or '0') .. ' ' .. (ngx.var.http_x_amz_meta_atollowner or ''))
    elseif method == 'DELETE' and status == 204 then
        objects:delete(key)
    end
    M.let_go()
end

function M.let_go()
    if ngx.ctx.claimed then claims:delete(ngx.ctx.claimed) end
    ngx.ctx.claimed = nil
end

local ESCAPES = { ['&'] = '&amp;', ['<'] = '&lt;', ['>'] = '&gt;' }

function M.list(bucket)
    wait('LIST', '')
    local prefix, found = bucket .. (ngx.req.get_uri_args().prefix or ''), {}
    for _, key in ipairs(objects:get_keys(0)) do
        if key:sub(1, #prefix) == prefix then found[#found + 1] = key end
    end
    table.sort(found)
    ngx.header.content_type = 'application/xml'
    ngx.say('<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>', #found, '</KeyCount>')
    for _, key in ipairs(found) do
        local size = (objects:get(key) or '0 '):match('^%d+')
        ngx.say('<Contents><Key>', (key:sub(#bucket + 1):gsub('[&<>]', ESCAPES)), '</Key><Size>', size,
            '</Size><ETag>"wire"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>')
    end
    ngx.say('</ListBucketResult>')
end

return M
